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
# each part, the trace, and what is measured after each variant and step: an early end loses little.
# Environment: PARTS (a,b,c,d,e), PART_SECONDS of all but d (180), CACHE (a folder of compiled
# programs and measured variants, which later calls continue), PYTHON, TEST_PLATFORMS (cuda,cpu).
set -uo pipefail
mkdir -p "$3" "${CACHE:=$HOME/.cache/jax_ppo/gpu_minutes}"
model=$(realpath "$1") data=$(realpath "$2") out=$(realpath "$3") cache=$(realpath "$CACHE")
end=$((SECONDS + $4)) python=${PYTHON:-python3} parts=,${PARTS:-a,b,c,d,e},
shift 4
cd "$(dirname "$0")/.." || exit 1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export JAX_COMPILATION_CACHE_DIR=$cache/compiled
if [ -d "$model/pieces" ]; then
    [ -d "$cache/model" ] || "$python" benchmarks/quantized_model.py unpack \
        "$model/pieces" "$model/base" "$cache/model" || exit 1
    model=$cache/model
fi
words=(--config=configs/gsm8k.py --config.model.path="$model"
    --config.data.train_files="$data/train.jsonl" --config.data.val_files="$data/test.jsonl" "$@")
rows=--config.actor.ppo_micro_batch_size_per_device checkpointing=--config.model.gradient_checkpointing
command_buffers=XLA_FLAGS=--xla_gpu_enable_command_buffer
variants=("" "$rows=16" "$checkpointing=True" --config.rollout.reuse_logprobs=always
    "$command_buffers=+WHILE" "$rows=32" "$command_buffers=" --config.model.attention=xla
    --config.rollout.max_num_seqs=128 "$checkpointing=False")
results=$out/variants.tsv
touch "$cache/variants.tsv" && cp "$cache/variants.tsv" "$results"
device=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader)
versions=$("$python" -c 'import sys, jax, flax, optax; print(sys.version.split()[0], *(m.__name__ + " " + m.__version__ for m in (jax, flax, optax)))')

begin() {  # PART SECONDS: fails if the part is not wanted
    [[ $parts == *,$1,* ]] || return 1
    part=$1 part_end=$((SECONDS + $2))
    echo "$device, $versions" > "$out/$part.txt"
}
run() {  # COMMAND...: until the part's time is up
    local limit=$(((part_end < end ? part_end : end) - SECONDS)) begun=$SECONDS
    if [ "$limit" -le 0 ]; then echo "part $part: no time for $variant $*"; return; fi
    timeout --signal=KILL "$limit" "$@" >> "$out/$part.txt" 2>&1 < /dev/null
    echo "part $part $variant: code $? after $((SECONDS - begun)) s (137: the time was up)"
    tail -n 3 "$out/$part.txt"
    cp "$results" "$cache/"
}
measure() {  # COMMAND...: with the option or flag of `variant`
    local option=("$variant") flags=${XLA_FLAGS:-}
    if [[ $variant != --* ]]; then option=() flags=${flags:+$flags }${variant#XLA_FLAGS=}; fi
    XLA_FLAGS=$flags VARIANT=$variant run "$@" "${words[@]}" "${option[@]}"
}

variant=
if begin a "${PART_SECONDS:=180}"; then measure "$python" benchmarks/gpu_parts.py profile "$out"; fi
if begin b "$PART_SECONDS"; then
    for variant in "${variants[@]}"; do
        if ! cut -f 2 "$results" | grep -qxFe "$variant"; then
            measure "$python" benchmarks/gpu_parts.py step "$out"
        fi
    done
    sort -g "$results" | cut -f 1,2 | tee -a "$out/b.txt"
fi
variant=
if begin c "$PART_SECONDS"; then measure "$python" benchmarks/gpu_parts.py ratios "$out"; fi
tests=100  # seconds, most of them to compile
[[ $parts == *,e,* ]] || tests=0
if begin d $((end - SECONDS - tests)); then
    variant=$(sort -g "$results" | head -n 1 | cut -f 2)
    work=$(mktemp -d)
    measure "$python" -m jax_ppo.train --workdir="$work" \
        --config.trainer.save_freq=0 --config.trainer.export=False &
    while kill -0 $! 2> /dev/null; do
        sleep 2
        cp "$work/training_metrics.csv" "$out/d.csv" 2> /dev/null
    done
    wait
    rm -rf "$work"
fi
variant=
if begin e "$tests"; then
    XLA_FLAGS='' JAX_PLATFORMS=${TEST_PLATFORMS:-cuda,cpu} run \
        "$python" -m pytest -q -p no:cacheprovider tests/models/test_gpu.py
fi
