"""Where the samples of a step come from, one file a way; `run.build` chooses one."""
