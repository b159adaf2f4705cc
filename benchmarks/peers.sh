#!/bin/sh
# Makes a Python environment with the programs that the benchmarks compare with: sh benchmarks/peers.sh FOLDER
set -eu
python3.11 -m venv "$1"
"$1/bin/pip" install torch==2.13.0 trl==1.12.0 google-tunix==0.1.7 --extra-index-url https://download.pytorch.org/whl/cpu
# tunix asks for an older safetensors, which would hold transformers back; it runs with the newer one.
"$1/bin/pip" install transformers==5.23.0
