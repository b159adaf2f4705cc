"""Qwen2.5-0.5B's true shapes on one NVIDIA GPU, random weights: decoding, training, a whole PPO step, and rivals.

    python benchmarks/accelerator.py                # cut off after --budget seconds; sections by name to run some
    python benchmarks/accelerator.py --tiny         # the same code at toy sizes, on any machine, in seconds

Each section runs in a process of its own and writes what it finds at once to results/accelerator.json: one that fails, or that
is cut off by --budget seconds, loses nothing of the others. Needs jax, flax, optax and NumPy; torch and transformers where
they are to be compared with. Shares are of what the hardware allows: for decoding the bytes of weights and of the caches' used
columns, once a token, at the memory's published rate; for training the FLOPs of the products that a trained token needs over
the matrix product measured in the same process. VERL_SECONDS is verl's published PPO step (Qwen2.5-0.5B on GSM8K, one GPU, 256
prompts, actor and critic; the sum of its phases), FLOOR_SECONDS that work's bytes and FLOPs at an H200's rates.
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
from pathlib import Path

HERE = Path(__file__).parent
SECTIONS = ("decode", "training", "step", "torch", "attention", "decode_command_buffers")
FLAGS = {"decode_command_buffers": "--xla_gpu_enable_command_buffer=+WHILE"}
BANDWIDTH = {
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
}  # bytes a second, by the device's name
VERL_SECONDS, FLOOR_SECONDS = 66.9, 0.97


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a section is run at. `prompt` + `response` is the context that a cache holds."""

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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"of {', '.join(SECTIONS)}; all if none is given",
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--budget", type=float, default=570, help="seconds for all sections")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "accelerator.json")
    parser.add_argument(
        "--here", action="store_true", help=argparse.SUPPRESS
    )  # runs one section in this process
    args = parser.parse_args()
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(f"{unknown.pop()}: no such section; there are {', '.join(SECTIONS)}")
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
    """What a section found, or {"error": why not}."""
    if seconds < 5:
        return {"error": "no time was left"}
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), FLAGS.get(name))))
    if "gpu" in flags and tiny:
        flags = ""  # a CPU's compiler may not know them
    paths = filter(None, (str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, name, "--here"] + ["--tiny"] * tiny
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, timeout=seconds, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired as error:
        return {
            "error": f"cut off after {seconds:.0f} seconds",
            "so_far": (error.stderr or b"").decode()[-3000:],
        }
    if done.returncode:
        return {"error": done.stderr.strip()[-2000:]}
    return json.loads(done.stdout.splitlines()[-1]) | {
        "section_seconds": time.monotonic() - started
    }


def make_step(sizes: Sizes, **changes):
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


def seconds(function, repeats: int) -> float:
    """Median of a call, waited for; the first, which compiles, is left out."""
    import jax

    taken = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(function())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def parameters(step) -> int:
    import jax

    return sum(x.size for x in jax.tree.leaves(step.state().actor))


def decode(sizes: Sizes) -> dict:
    """Tokens a second while every slot is busy, by the program that reads the cache, the one of choice first: what responses of
    full length take longer than those of two tokens, which are mostly the prefill. Their share of the limit, where the memory's
    rate is known."""
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
    found = {}
    for program in dict.fromkeys((make_step(sizes).decoder.decoding, "gpu")):
        try:
            taken = {
                response: decode_seconds(sizes, program, response)
                for response in (2, sizes.response)
            }
            per_second = sizes.slots * (sizes.response - 2) / (taken[sizes.response] - taken[2])
            found[program] = {
                "tokens_per_second": per_second,
                "share_of_limit": limit and per_second / limit,
                "whole_seconds": {str(length): value for length, value in taken.items()},
            }
        except Exception as error:  # cuDNN refuses something, say
            found[program] = {"error": str(error)[:300]}
        print(program, found[program], file=sys.stderr, flush=True)
    return {"programs": found, "limit_tokens_per_second": limit} | device()


def decode_seconds(sizes: Sizes, program: str, response: int) -> float:
    import jax

    step = make_step(sizes, response=response, decoding=program)
    given = step.random_decode_params(), step.random_prompts(step.full_lengths()), jax.random.key(0)
    with jax.set_mesh(step.mesh):
        return seconds(lambda: step.sampler(*given), sizes.repeats)


def training(sizes: Sizes) -> dict:
    """Tokens a second and model FLOPs' share of the matrix product's, of the actor's and critic's update, by micro-batch."""
    peak, found = product_flops(sizes), {}
    samples = sizes.micro_batches[-1]
    for rows, remat in [(rows, False) for rows in sizes.micro_batches] + [(samples, True)]:
        name = f"{rows} rows{', layers recomputed' if remat else ''}"
        try:
            found[name] = train(
                make_step(sizes, samples=samples, rows=rows, remat=remat), sizes, peak
            )
        except Exception as error:  # too large for the memory, say: that is a finding too
            found[name] = {"error": str(error)[:300]}
        print(name, found[name], file=sys.stderr, flush=True)
    return {"product_tflops": peak / 1e12, "micro_batches": found} | device()


def train(step, sizes: Sizes, peak: float) -> dict:
    taken = step.seconds_of_update(sizes.repeats)
    tokens = step.samples * (sizes.prompt + sizes.response)
    head = (
        step.architecture.vocab_size * step.architecture.hidden_size
    )  # the actor's alone, and where a response token is
    needed = 6 * (2 * (parameters(step) - head) * tokens + head * step.samples * sizes.response)
    return {"seconds": taken, "tokens_per_second": tokens / taken, "mfu": needed / taken / peak}


def product_flops(sizes: Sizes) -> float:
    """FLOPs a second of a square product of matrices in bfloat16."""
    import jax
    import jax.numpy as jnp

    n = sizes.product
    x = jnp.ones((n, n), jnp.bfloat16)
    chain = jax.jit(lambda a, b: jax.lax.fori_loop(0, 10, lambda _, y: y @ b, a))
    return 10 * 2 * n**3 / seconds(lambda: chain(x, x), sizes.repeats)


def step(sizes: Sizes) -> dict:
    """The phases of verl's published step: 256 prompts, its lengths, actor, critic and reference."""
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
    """Milliseconds of causal attention, forward and backward, by program: of whole rows, and of two samples packed in each. And
    of one new token a slot to a cache that is half used, with the largest difference from the first that ran."""
    import jax
    import jax.numpy as jnp

    from jax_ppo.models import cache
    from jax_ppo.models.attention import run_attention

    length, rows, found = sizes.prompt + sizes.response, min(8, sizes.slots), {}
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
                found[f"{program}, {name}"] = {"milliseconds": 1000 * taken}
            except Exception as error:  # cuDNN where there is none
                found[f"{program}, {name}"] = {"error": str(error)[:300]}
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
            found[f"{program}, one token"] = {
                "milliseconds": 1000 * taken,
                "difference": float(jnp.abs(outputs[-1] - outputs[0]).max()),
            }
        except Exception as error:
            found[f"{program}, one token"] = {"error": str(error)[:300]}
    return found | device()


def torch(sizes: Sizes) -> dict:
    """Decoding and training by transformers' own model in torch; its decoding has the prefill in it, ours has not."""
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
    found = {
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
            found[name] = function(torch, model, sizes)
        except Exception as error:
            found[name] = {"error": str(error)[:500]}
        print(name, found[name], file=sys.stderr, flush=True)
    return found


def torch_seconds(torch, function, repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def torch_generate(torch, model, sizes: Sizes) -> dict:
    prompts = torch.randint(2, sizes.vocabulary, (sizes.slots, sizes.prompt), device="cuda")
    new = min(64, sizes.response)  # it decodes slowly; a few tokens tell
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


def torch_generate_batch(torch, model, sizes: Sizes) -> dict:
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


def torch_train(torch, model, sizes: Sizes) -> dict:
    """Forward, backward and AdamW of one model; ours times two."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    rows, length = min(sizes.micro_batches[1], 8), sizes.prompt + sizes.response
    tokens = torch.randint(2, sizes.vocabulary, (rows, length), device="cuda")

    def one():
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"tokens_per_second": rows * length / torch_seconds(torch, one, sizes.repeats)}


def device() -> dict:
    import jax

    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


if __name__ == "__main__":
    main()
