#!/usr/bin/env bash
# Runs the tests on a newer JAX than the oldest one supported, and without torch (what compares with it is skipped).
#   tests/newest_stack.sh [pytest's arguments]         PYTHON and JAX_VERSION choose others than Python 3.12 and 0.11.2
set -euo pipefail
cd "$(dirname "$0")/.."

environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
"${PYTHON:-python3.12}" -m venv "$environment"
export PATH="$environment/bin:$PATH"

python -m pip install --quiet "jax==${JAX_VERSION:-0.11.2}" -e . hypothesis 'pytest>=9' tensorboard
python -m pytest "$@"
