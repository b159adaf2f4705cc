#!/bin/sh
# Create a Python environment with the libraries that the benchmarks compare against:
#   sh benchmarks/peers.sh FOLDER [VERL_FOLDER]
# VERL_FOLDER gets a second environment with verl and OpenRLHF for oracles.py. Only the packages
# that their functions need are installed, not what their training needs.
set -eu
torch_index=https://download.pytorch.org/whl/cpu
python3.11 -m venv "$1"
"$1/bin/pip" install torch==2.13.0 trl==1.12.0 peft==0.21.2 google-tunix==0.1.7 \
    --extra-index-url "$torch_index"
# tunix requires an older safetensors, which would force an older transformers, but also works with
# the newer one.
"$1/bin/pip" install transformers==5.23.0
if [ $# -gt 1 ]; then
    python3.11 -m venv "$2"
    "$2/bin/pip" install torch==2.13.0 tensordict==0.10.0 transformers==5.10.4 ray==2.60.0 \
        omegaconf==2.4.0 codetiming==1.4.0 orjson==3.13.0 --extra-index-url "$torch_index"
    "$2/bin/pip" install --no-deps verl==0.9.1 openrlhf==0.11.2
fi
