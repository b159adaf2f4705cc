"""Measure decoding, training and a PPO step at Qwen2.5-0.5B's shapes on one NVIDIA GPU.

    python benchmarks/accelerator.py                # all sections, within --budget seconds
    python benchmarks/accelerator.py decode step    # only the named sections
    python benchmarks/accelerator.py --tiny         # the same code at toy sizes, on any machine

Weights are random. Each section runs in its own process and writes its results immediately to
results/accelerator.json, so a section that fails or is cut off by --budget does not affect the
others. Requires jax, flax, optax and NumPy; also torch and transformers for the comparison with
them. Shares are relative to the hardware limit. For decoding, the limit is reading the weights and
the used columns of the caches once per token at the memory's published rate. For training, it is
the FLOPs of the matrix products that a trained token needs, at the rate of a matrix product
measured in the same process. VERL_SECONDS is verl's published PPO step (Qwen2.5-0.5B on GSM8K, one
GPU, 256 prompts, actor and critic; the sum of its phases). FLOOR_SECONDS is the time for that
work's bytes and FLOPs at an H200's rates.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness

if TYPE_CHECKING:
    import programs

HERE = Path(__file__).parent
SECTIONS = ("decode", "training", "step", "torch", "attention", "decode_command_buffers")
FLAGS = {"decode_command_buffers": "--xla_gpu_enable_command_buffer=+WHILE"}
BANDWIDTH = {
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
}  # bytes per second, by device name
VERL_SECONDS, FLOOR_SECONDS = 66.9, 0.97


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that a section runs at. A cache holds `prompt` + `response` tokens."""

    layers: int = 24
    hidden: int = 896
    heads: int = 14
    mlp: int = 4864
    vocabulary: int = 151_936
    slots: int = 256
    prompt: int = 256
    response: int = 512
    mean_prompt: int = 104
    mean_response: int = 307
    micro_batches: tuple[int, ...] = (4, 8, 16, 32)
    product: int = 8192
    repeats: int = 5


TINY = Sizes(
    layers=2,
    hidden=128,
    heads=2,
    mlp=256,
    vocabulary=512,
    slots=8,
    prompt=8,
    response=8,
    mean_prompt=5,
    mean_response=5,
    micro_batches=(1, 2),
    product=64,
    repeats=2,
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"one of {', '.join(SECTIONS)}; default: all",
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--budget", type=float, default=570, help="seconds for all sections")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "accelerator.json")
    parser.add_argument(
        "--here", action="store_true", help=argparse.SUPPRESS
    )  # runs one section in this process
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"{unknown.pop()}: unknown section; expected one of {', '.join(SECTIONS)}")
    sizes = TINY if args.tiny else Sizes()
    if args.here:
        print(json.dumps(globals()[args.sections[0].removesuffix("_command_buffers")](sizes)))
        return
    deadline, result = time.monotonic() + args.budget, {"sizes": dataclasses.asdict(sizes)}
    for section in args.sections or SECTIONS:
        result[section] = run_section(section, args.tiny, deadline - time.monotonic())
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(section, json.dumps(result[section]), flush=True)


def run_section(name: str, tiny: bool, seconds: float) -> dict:
    """Run a section in its own process; return its results, or {"error": reason}."""
    if seconds < 5:
        return {"error": "no time left"}
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), FLAGS.get(name))))
    if "gpu" in flags and tiny:
        flags = ""  # the CPU compiler may reject GPU flags
    paths = filter(None, (str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, name, "--here"] + ["--tiny"] * tiny
    started = time.monotonic()
    try:
        process = subprocess.run(
            harness.end_with_this_process(command),
            env=environment,
            timeout=seconds,
            capture_output=True,
            text=True,
        )
    except subprocess.TimeoutExpired as error:
        return {
            "error": f"cut off after {seconds:.0f} seconds",
            "so_far": (error.stderr or b"").decode()[-3000:],
        }
    if process.returncode:
        return {"error": process.stderr.strip()[-2000:]}
    return json.loads(process.stdout.splitlines()[-1]) | {
        "section_seconds": time.monotonic() - started
    }


def make_step(sizes: Sizes, **changes: Any) -> "programs.Step":
    """Build a PPO step at these sizes, with `changes` to its fields."""
    import programs

    architecture = programs.qwen2(
        sizes.layers,
        sizes.hidden,
        sizes.vocabulary,
        tied=True,
        query_heads=sizes.heads,
        kv_heads=min(2, sizes.heads),
        mlp=sizes.mlp,
    )
    return programs.Step(
        architecture,
        **{
            "samples": sizes.slots,
            "prompt": sizes.prompt,
            "response": sizes.response,
            "dtype": "bfloat16",
            "remat": True,
            "slots": sizes.slots,
        }
        | changes,
    )


def seconds(function: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of a blocking call, excluding the first, which compiles."""
    import jax

    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(function())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def parameters(step: "programs.Step") -> int:
    """Count the actor's parameters."""
    import jax

    return sum(x.size for x in jax.tree.leaves(step.state().actor))


def decode(sizes: Sizes) -> dict:
    """Measure decoded tokens per second with every slot busy, for each cache program.

    The rate comes from the additional time of full-length responses over two-token responses, which
    are mostly prefill. The default program comes first. The share of the limit is reported if the
    device's memory rate is known.
    """
    import jax

    a, rate = make_step(sizes).architecture, BANDWIDTH.get(jax.devices()[0].device_kind)
    cache = (
        2
        * a.num_layers
        * a.num_kv_heads
        * a.head_dim
        * 2
        * sizes.slots
        * (sizes.prompt + sizes.response / 2)
    )
    limit = rate and sizes.slots * rate / (2 * parameters(make_step(sizes)) + cache)
    results = {}
    for program in dict.fromkeys((make_step(sizes).decoder.decoding, "gpu")):
        try:
            taken = {
                response: decode_seconds(sizes, program, response)
                for response in (2, sizes.response)
            }
            per_second = sizes.slots * (sizes.response - 2) / (taken[sizes.response] - taken[2])
            results[program] = {
                "tokens_per_second": per_second,
                "share_of_limit": limit and per_second / limit,
                "whole_seconds": {str(length): value for length, value in taken.items()},
            }
        except Exception as error:  # for example, cuDNN rejects the shapes
            results[program] = {"error": str(error)[:300]}
        print(program, results[program], file=sys.stderr, flush=True)
    return {"programs": results, "limit_tokens_per_second": limit} | device()


def decode_seconds(sizes: Sizes, program: str, response: int) -> float:
    """Return the median seconds of a rollout of `response` tokens per prompt."""
    import jax

    step = make_step(sizes, response=response, decoding=program)
    sampler_args = (
        step.random_decode_params(),
        step.random_prompts(step.full_lengths()),
        jax.random.key(0),
    )
    with jax.set_mesh(step.mesh):
        return seconds(lambda: step.sampler(*sampler_args), sizes.repeats)


def training(sizes: Sizes) -> dict:
    """Measure tokens per second and MFU of the actor and critic update, by micro-batch size.

    MFU is the share of model FLOPs in the rate of a plain matrix product.
    """
    peak, results = product_flops(sizes), {}
    samples = sizes.micro_batches[-1]
    for rows, remat in [(rows, False) for rows in sizes.micro_batches] + [(samples, True)]:
        name = f"{rows} rows{', layers recomputed' if remat else ''}"
        try:
            results[name] = train(
                make_step(sizes, samples=samples, rows=rows, remat=remat), sizes, peak
            )
        except Exception as error:  # for example out of memory, which is a result as well
            results[name] = {"error": str(error)[:300]}
        print(name, results[name], file=sys.stderr, flush=True)
    return {"product_tflops": peak / 1e12, "micro_batches": results} | device()


def train(step: "programs.Step", sizes: Sizes, peak: float) -> dict:
    """Measure one update; `peak` is the FLOPs per second of a plain matrix product."""
    taken = step.seconds_of_update(sizes.repeats)
    tokens = step.samples * (sizes.prompt + sizes.response)
    # Only the actor has an output head, and only response tokens use it.
    head = step.architecture.vocab_size * step.architecture.hidden_size
    needed = 6 * (2 * (parameters(step) - head) * tokens + head * step.samples * sizes.response)
    return {"seconds": taken, "tokens_per_second": tokens / taken, "mfu": needed / taken / peak}


def product_flops(sizes: Sizes) -> float:
    """Measure the FLOPs per second of a square bfloat16 matrix product."""
    import jax
    import jax.numpy as jnp

    n = sizes.product
    x = jnp.ones((n, n), jnp.bfloat16)
    chain = jax.jit(lambda a, b: jax.lax.fori_loop(0, 10, lambda _, y: y @ b, a))
    return 10 * 2 * n**3 / seconds(lambda: chain(x, x), sizes.repeats)


def step(sizes: Sizes) -> dict:
    """Measure the phases of verl's published step.

    256 prompts with its response lengths; actor, critic and reference.
    """
    import numpy as np
    import workload

    prompts = (
        np.random.default_rng(1)
        .integers(2, 2 * sizes.mean_prompt - 1, sizes.slots)
        .astype(np.int32)
    )
    chance = workload.eos_chance(sizes.mean_response, sizes.response)
    ours = make_step(sizes, endings=round(chance * sizes.vocabulary))
    phases, tokens = ours.seconds_of_phases(
        np.minimum(prompts, sizes.prompt), max(1, sizes.repeats // 2)
    )
    total = sum(phases.values())
    return {
        "seconds": total,
        "phases": phases,
        "tokens": tokens,
        "times_an_h200s_floor": total / FLOOR_SECONDS,
        "times_verl": VERL_SECONDS / total,
    } | device()


def attention(sizes: Sizes) -> dict:
    """Measure milliseconds of attention, by program.

    Causal attention is measured forward and backward, with one sample per row and with two packed
    samples per row. Decoding attention is measured for one new token per slot and a half-used
    cache, with the largest difference from the first program that ran.
    """
    import jax
    import jax.numpy as jnp

    from jax_ppo.models import cache
    from jax_ppo.models.attention import run_attention

    length, rows, results = sizes.prompt + sizes.response, min(8, sizes.slots), {}
    q, k = (
        jax.random.normal(jax.random.key(i), (rows, length, n, 64), jnp.bfloat16)
        for i, n in enumerate((sizes.heads, min(2, sizes.heads)))
    )
    halves = jnp.broadcast_to(jnp.arange(length) * 2 // length, (rows, length))
    for program in ("xla", "cudnn"):
        for name, segments in (("whole", None), ("packed", halves)):

            def loss(q, k, v, program=program, segments=segments):
                return run_attention(program, q, k, v, segments).astype(jnp.float32).sum()

            gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
            try:
                taken = seconds(lambda gradient=gradient: gradient(q, k, k), sizes.repeats)
                results[f"{program}, {name}"] = {"milliseconds": 1000 * taken}
            except Exception as error:  # for example, cuDNN is unavailable
                results[f"{program}, {name}"] = {"error": str(error)[:300]}
    q, k, v = (
        jax.random.normal(jax.random.key(i), (sizes.slots, columns, n, 64), jnp.bfloat16)
        for i, (columns, n) in enumerate(
            ((1, q.shape[2]), (length, k.shape[2]), (length, k.shape[2]))
        )
    )
    columns, outputs = jnp.arange(sizes.slots) * length // sizes.slots, []
    for program in ("gpu", "tpu", "cudnn"):
        read = jax.jit(functools.partial(cache.attend_to_cache, program))
        try:
            layer = cache.cache_layout(program, k, v)
            outputs.append(read(q, layer, columns).astype(jnp.float32))
            taken = seconds(lambda read=read, layer=layer: read(q, layer, columns), sizes.repeats)
            results[f"{program}, one token"] = {
                "milliseconds": 1000 * taken,
                "difference": float(jnp.abs(outputs[-1] - outputs[0]).max()),
            }
        except Exception as error:
            results[f"{program}, one token"] = {"error": str(error)[:300]}
    return results | device()


def torch(sizes: Sizes) -> dict:
    """Measure decoding and training of the transformers model in torch.

    Its decoding figures include the prefill; ours do not.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        return {"skipped": str(error)}
    if not torch.cuda.is_available():
        return {"skipped": "torch sees no CUDA device"}
    config = transformers.Qwen2Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=min(2, sizes.heads),
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        max_position_embeddings=32768,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    results = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(),
    }
    for name, function in (
        ("generate", torch_generate),
        ("generate_batch", torch_generate_batch),
        ("training", torch_train),
    ):
        try:
            results[name] = function(torch, model, sizes)
        except Exception as error:
            results[name] = {"error": str(error)[:500]}
        print(name, results[name], file=sys.stderr, flush=True)
    return results


def torch_seconds(torch: Any, function: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of a call, synchronised, excluding the first."""
    taken = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def torch_generate(torch: Any, model: Any, sizes: Sizes) -> dict:
    """Measure `generate` on one batch."""
    prompts = torch.randint(2, sizes.vocabulary, (sizes.slots, sizes.prompt), device="cuda")
    new = min(64, sizes.response)  # it decodes slowly; a few tokens suffice
    options = dict(
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        min_new_tokens=new,
        max_new_tokens=new,
        top_k=0,
    )
    with torch.no_grad():
        taken = torch_seconds(torch, lambda: model.generate(prompts, **options), 1)
    return {"tokens_per_second": sizes.slots * new / taken}


def torch_generate_batch(torch: Any, model: Any, sizes: Sizes) -> dict:
    """Measure `generate_batch`, continuous batching."""
    from transformers import GenerationConfig

    prompts = torch.randint(2, sizes.vocabulary, (sizes.slots, sizes.prompt)).tolist()
    new = min(128, sizes.response)
    options = GenerationConfig(do_sample=True, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
    with torch.no_grad():
        taken = torch_seconds(
            torch,
            lambda: model.generate_batch(prompts, generation_config=options, progress_bar=False),
            1,
        )
    return {"tokens_per_second": sizes.slots * new / taken}


def torch_train(torch: Any, model: Any, sizes: Sizes) -> dict:
    """Measure forward, backward and AdamW of one model; our figures cover two models."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rows, length = min(sizes.micro_batches[1], 8), sizes.prompt + sizes.response
    tokens = torch.randint(2, sizes.vocabulary, (rows, length), device="cuda")

    def one() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"tokens_per_second": rows * length / torch_seconds(torch, one, sizes.repeats)}


def device() -> dict:
    """Describe the device and its software."""
    import jax

    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


if __name__ == "__main__":
    main()
