#!/bin/sh
# Create a Python environment with the libraries that the benchmarks compare against:
#   sh benchmarks/peers.sh FOLDER
set -eu
python3.11 -m venv "$1"
"$1/bin/pip" install torch==2.13.0 trl==1.12.0 peft==0.21.2 google-tunix==0.1.7 \
    --extra-index-url https://download.pytorch.org/whl/cpu
# tunix requires an older safetensors, which would force an older transformers, but also works with
# the newer one.
"$1/bin/pip" install transformers==5.23.0
