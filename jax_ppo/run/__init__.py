"""The life of an experiment: build its parts, resume, loop over steps, evaluate, report, export."""
