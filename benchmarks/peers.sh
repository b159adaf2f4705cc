#!/bin/sh
# Makes a Python environment with the programs that the benchmarks compare with: sh benchmarks/peers.sh FOLDER [FOLDER_OF_VERL]
# With a second folder also one for verl and OpenRLHF, for oracles.py: what their functions need, not what training needs.
set -eu
python3.11 -m venv "$1"
"$1/bin/pip" install torch==2.13.0 trl==1.12.0 google-tunix==0.1.7 --extra-index-url https://download.pytorch.org/whl/cpu
# tunix asks for an older safetensors, which would hold transformers back; it runs with the newer one.
"$1/bin/pip" install transformers==5.23.0
if [ $# -gt 1 ]; then
    python3.11 -m venv "$2"
    "$2/bin/pip" install torch==2.13.0 tensordict==0.10.0 transformers==5.10.4 ray==2.60.0 omegaconf==2.4.0 codetiming==1.4.0 \
        orjson==3.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
    "$2/bin/pip" install --no-deps verl==0.9.1 openrlhf==0.11.2
fi
