"""`python -m jax_ppo.config` prints the table of options; with `--markdown`, docs/options.md."""

import sys

from jax_ppo.config import reference

if sys.argv[1:] == ["--markdown"]:
    print(reference.options_markdown(), end="")
elif not sys.argv[1:]:
    reference.print_options()
else:
    sys.exit("usage: python -m jax_ppo.config [--markdown]")
