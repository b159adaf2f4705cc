"""Run the command, as `python -m jax_ppo.train`."""

import sys

from jax_ppo.train import main

if __name__ == "__main__":
    main(sys.argv)
