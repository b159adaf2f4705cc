#!/usr/bin/env bash
# Measures PPO on GSM8K at verl's sizes on one GPU for a given time, in parts, best first:
#   a  a warm step by program, with the 20 longest kernels of each
#   b  steps with one option or flag changed at a time
#   c  ratios in bfloat16 that rounding alone moves out of 0.9 to 1.1
#   d  accuracy over the steps with the fastest settings, for the rest of the time
#   e  the GPU tests
#   benchmarks/gpu_minutes.sh MODEL DATA OUT SECONDS [--config.OPTION=VALUE ...]
# MODEL is a Hugging Face folder of Qwen2.5-0.5B, or a folder with pieces/ and base/ as
# quantized_model.py takes them. DATA holds GSM8K's train.jsonl and test.jsonl. OUT gets a text for
# each part, the trace, d's work directory (an earlier one becomes d.before), and each variant's
# figures when it ends.
# Environment: PARTS (a,b,c,d,e), PART_SECONDS of all but d (180), PYTHON, TEST_PLATFORMS
# (cuda,cpu), CACHE, a folder of compiled programs and of what was measured: a later call with the
# same device, versions, commit and options measures only what is missing, and d again.
set -uo pipefail
[ $# -ge 4 ] || { sed -n '2,/^set/s/^# //p' "$0"; exit 2; }
ls -d "$1" "$2"/{train,test}.jsonl > /dev/null || exit 2
mkdir -p "$3" "${CACHE:=$HOME/.cache/jax_ppo/gpu_minutes}"
model=$(realpath "$1") data=$(realpath "$2") out=$(realpath "$3") cache=$(realpath "$CACHE")
end=$((SECONDS + $4)) python=${PYTHON:-python3} parts=,${PARTS:-a,b,c,d,e},
shift 4
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export JAX_COMPILATION_CACHE_DIR=$cache/compiled
if [ -d "$model/pieces" ]; then
    pieces=$model/pieces base=$model/base model=$cache/model
    if [ ! -d "$model" ]; then
        "$python" benchmarks/quantized_model.py unpack "$pieces" "$base" "$model.part" || exit 1
        mv "$model.part" "$model"
    fi
fi
words=(--config=configs/gsm8k.py --config.model.path="$model"
    --config.data.train_files="$data/train.jsonl" --config.data.val_files="$data/test.jsonl" "$@")
versions=$("$python" -c '
import sys, jax, flax, optax
print(sys.version.split()[0], *(m.__name__ + " " + m.__version__ for m in (jax, flax, optax)))') ||
    exit 1
# By default XLA (jaxlib 0.10.2) records fusions and calls of libraries in command buffers, uses
# Triton for products and measures candidates of each (autotuning level 4). Compiled for an H100:
flags=(
    --xla_gpu_enable_command_buffer=+WHILE        # a loop is one launch; same kernels and seconds
    --xla_gpu_enable_command_buffer=              # launches each kernel by itself, to compare
    --xla_gpu_enable_triton_gemm=false            # cuBLAS: 5.9, not 7.2 s to compile 6 layers
    --xla_gpu_experimental_gemm_fusion_v2=true    # 10.0 kernels a layer in decoding, not 12.0
    --xla_gpu_autotune_level=0)                   # measures no candidates of products
rows=--config.actor.ppo_micro_batch_size_per_device
checkpointing=--config.model.gradient_checkpointing
variants=("" "$rows=16" "$checkpointing=True" --config.rollout.reuse_logprobs=always "$rows=32"
    "${flags[@]/#/XLA_FLAGS=}" --config.model.attention=xla --config.rollout.max_num_seqs=128
    "$checkpointing=False")
device=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2> /dev/null)
header="${device:-no NVIDIA GPU}, $versions, commit $(git describe --always --dirty 2> /dev/null)"
kept=$cache/$(cksum <<< "$header ${words[*]}" | cut -d ' ' -f 1) results=$out/variants.tsv
mkdir -p "$kept" && touch "$kept/variants.tsv" && cp "$kept"/* "$out" || exit 1

begin() {  # PART SECONDS: fails if the part is not wanted, or was measured before
    [[ $parts == *,$1,* ]] || return 1
    part=$1 part_end=$((SECONDS + $2)) variant=
    if [ -e "$kept/$part.txt" ]; then echo "part $part: measured before"; return 1; fi
    echo "$header" > "$out/$part.txt"
}
run() {  # COMMAND...: until the part's time is up, or this script ends
    local begun=$SECONDS limit=$((part_end < end ? part_end : end)) up=
    code=137
    if [ "$begun" -ge "$limit" ]; then echo "part $part: no time for $variant"; return; fi
    "$python" benchmarks/end_with_parent.py $$ "$@" >> "$out/$part.txt" 2>&1 < /dev/null &
    while kill -0 $! 2> /dev/null && [ "$SECONDS" -lt "$limit" ]; do sleep 0.2; done
    if kill -KILL $! 2> /dev/null; then up=", its time was up"; fi
    wait $! 2> /dev/null
    code=$?
    echo "part $part $variant: code $code after $((SECONDS - begun)) s$up"
    tail -n 3 "$out/$part.txt"
    cp "$results" "$kept/"
}
measure() {  # COMMAND...: with the option or flag of `variant`
    local option=("$variant") flags=${XLA_FLAGS:-}
    if [[ $variant != --* ]]; then option=() flags=${flags:+$flags }${variant#XLA_FLAGS=}; fi
    XLA_FLAGS=$flags VARIANT=$variant run "$@" "${words[@]}" "${option[@]}"
}
keep() {  # the results of a part that has ended well
    [ "$code" != 0 ] || cp "$out/$part".* "$kept/"
}

if begin a "${PART_SECONDS:=180}"; then
    measure "$python" benchmarks/gpu_parts.py profile "$out"
    keep
fi
if begin b "$PART_SECONDS"; then
    for variant in "${variants[@]}"; do
        if cut -f 2 "$results" | grep -qxFe "$variant"; then continue; fi
        measure "$python" benchmarks/gpu_parts.py step "$out"
        # What fails where others do not is not tried again.
        if [[ $code != @(0|137) && -s $results ]]; then
            printf 'inf\t%s\tcode %s\n' "$variant" "$code" >> "$results"
            cp "$results" "$kept/"
        fi
    done
    sort -g "$results" | cut -f 1,2 | tee -a "$out/b.txt"
fi
if begin c "$PART_SECONDS"; then
    measure "$python" benchmarks/gpu_parts.py ratios "$out"
    keep
fi
tests=100  # seconds, most of them to compile
if [[ $parts != *,e,* || -e $kept/e.txt ]]; then tests=0; fi
if begin d $((end - SECONDS - tests)); then
    variant=$(sort -g "$results" | head -n 1 | cut -f 2)
    [ ! -d "$out/d" ] || mv -T --backup=numbered "$out/d" "$out/d.before"
    measure "$python" -m jax_ppo.train --workdir="$out/d" \
        --config.trainer.save_freq=0 --config.trainer.export=False
fi
if begin e "$tests"; then
    XLA_FLAGS='' JAX_PLATFORMS=${TEST_PLATFORMS:-cuda,cpu} run \
        "$python" -m pytest -q -p no:cacheprovider tests/models/test_gpu.py
    keep
fi
