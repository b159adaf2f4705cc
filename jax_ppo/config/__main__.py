"""`python -m jax_ppo.config` prints all options; with `--markdown`, docs/options.md."""

import sys

from jax_ppo.config import main

if __name__ == "__main__":
    main(sys.argv)
