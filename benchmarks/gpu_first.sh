#!/usr/bin/env bash
# Runs GSM8K by PPO at verl's sizes on one NVIDIA GPU for a given time, then the GPU tests.
#   benchmarks/gpu_first.sh MODEL DATA OUT SECONDS [--config.OPTION=VALUE ...]
# MODEL is a Hugging Face folder of Qwen2.5-0.5B, or a folder with pieces/ and base/ as
# quantized_model.py takes them. DATA holds GSM8K's train.jsonl and test.jsonl. Every few seconds OUT
# gets what there is: metrics after every step (training_metrics.csv: accuracy, tokens per second,
# MFU, memory), the console, the curves. An early end loses nothing. PYTHON chooses the interpreter.
set -uo pipefail
mkdir -p "$3"
model=$(realpath "$1") data=$(realpath "$2") out=$(realpath "$3") seconds=$4
shift 4
cd "$(dirname "$0")/.." || exit 1
test_seconds=100  # most of them compile
end=$((SECONDS + seconds - test_seconds - 10))
python=${PYTHON:-python3}
work=$(mktemp -d)
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

copy_results() {
    for name in training_metrics.csv config.json report.html summary.json; do
        if [ -f "$work/run/$name" ]; then cp "$work/run/$name" "$out/$name"; fi
    done
}

if [ -d "$model/pieces" ]; then
    "$python" benchmarks/quantized_model.py unpack "$model/pieces" "$model/base" "$work/model" || exit 1
    model=$work/model
fi
echo "PPO begins after $SECONDS seconds"
timeout --signal=KILL $((end - SECONDS)) "$python" -m jax_ppo.train --config=configs/gsm8k.py \
    --workdir="$work/run" --config.model.path="$model" \
    --config.data.train_files="$data/train.jsonl" --config.data.val_files="$data/test.jsonl" \
    --config.trainer.save_freq=0 --config.trainer.export=False "$@" \
    > "$out/console.txt" 2>&1 &
training=$!
while kill -0 "$training" 2> /dev/null; do
    sleep 2
    copy_results
done
wait "$training"
echo "PPO ended with code $? (137: the time was up)"
copy_results
tail -n 40 "$out/console.txt"
{
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
    "$python" -c 'import sys, jax, flax, optax; print(sys.version.split()[0], *(m.__name__ + " " + m.__version__ for m in (jax, flax, optax)))'
    XLA_FLAGS='' JAX_PLATFORMS=${TEST_PLATFORMS:-cuda,cpu} timeout "$test_seconds" \
        "$python" -m pytest -q -p no:cacheprovider tests/models/test_gpu.py
} > "$out/tests.txt" 2>&1
cat "$out/tests.txt"
rm -rf "$work"
