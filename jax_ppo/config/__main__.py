"""`python -m jax_ppo.config` prints all options; with `--markdown`, docs/options.md."""

import sys

from jax_ppo.config import reference

if __name__ == "__main__":
    reference.main(sys.argv[1:])
