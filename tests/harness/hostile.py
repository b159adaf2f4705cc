"""Feed generated hostile inputs to the package: each must be accepted correctly or refused kindly.

    python tests/harness/hostile.py --inputs 10000 --seed 0

An input is one thing that a person or a model supplies: an option, a file of a model. (Tests list
what is small enough: fields of config.json and adapter_config.json, names of options, sources and
rows of data, answers of environments, results of reward functions, replies of judges.) It is
accepted, and then the outcome is what an independent computation says; or refused by a `UserError`
of one line that names it. Neither may take longer than two seconds, show a traceback, write outside
the input's folder or leave a process behind. An input that crashes the interpreter or hangs ends
the run.

The inputs follow from `--seed` alone. A failure prints the kind and the number of its input:
`--kind KIND --only NUMBER` repeats it.
"""

import argparse
import collections
import contextlib
import faulthandler
import functools
import io
import json
import logging
import math
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))  # this checkout, whatever is installed

SECONDS = 2.0  # of one input: of the processor's time, so that a busy machine changes nothing
HANG = 300.0  # seconds of one input after which the run ends: imports are slow
ACCEPTED, REFUSED, FAILED = "accepted", "refused", "failed"


class Wrong(Exception):
    """The package accepted an input and made something else of it."""


# --- Values ---------------------------------------------------------------------------------------

TEXTS = (
    *("", " ", "a", "true", "None", "nan", "-0", "1e400", "0x10", "١٢", "1_000", "½", "é\u0301"),
    *("../x", "/etc/passwd", "~nouser/x", "C:\\x", "gs://b/x", "hf:a/b", "a" * 5000, "\x00"),
    *("\ufeff", "\x1b[31mred\x1b[0m", "\r\n", "\u202e", "\ud800", "%s %d {x}", "$(touch pwned)"),
    *("'; --", "🤖" * 9, "__class__", "os:system", "module:function", "<|endoftext|>"),
    *("{{ 7 * 7 }}", "{% for %}"),
)
NUMBERS = (
    *(0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 10**40, 10**4400),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -2.5, 1e-45, 1e-9, 1e38, 1e39, 1e308),
    *(math.nan, math.inf, -math.inf),
)


def any_value(r: random.Random, depth: int = 2) -> Any:
    """Return a value of any kind that JSON can hold."""
    kind = r.randrange(8 if depth else 5)
    if kind == 0:
        return r.choice((None, True, False))
    if kind in (1, 2):
        return r.choice(NUMBERS)
    if kind in (3, 4):
        return r.choice(TEXTS)
    if kind == 5:
        return [any_value(r, depth - 1) for _ in range(r.randrange(4))]
    if kind == 6:
        return {r.choice(TEXTS): any_value(r, depth - 1) for _ in range(r.randrange(3))}
    return nested(r.choice((50, 150, 3000)))


def nested(depth: int) -> Any:
    """Return a list in a list, many times."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def to_json(value: Any) -> str:
    """Return JSON text, also of values that Python's encoder refuses."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        depth = 0
        while isinstance(value, list) and len(value) == 1:
            value, depth = value[0], depth + 1
        return "[" * depth + to_json(value) + "]" * depth
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**4000:
        return "1" + "0" * 4400
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {to_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(to_json, value)) + "]"
    return json.dumps(value)


def any_bytes(r: random.Random, text: bytes) -> bytes:
    """Return the bytes with some of them changed, cut or added."""
    data = bytearray(text)
    for _ in range(r.randrange(1, 4)):
        at = r.randrange(len(data) + 1)
        match r.randrange(4):
            case 0:
                del data[at:]
            case 1:
                data[at:at] = r.randbytes(r.randrange(1, 9))
            case 2:
                del data[at : at + r.randrange(1, 9)]
            case _:
                data[at : at + 1] = r.choice((b"\xff", b"\x00", b"{", b"]", b'"', b"9", b"\n"))
    return bytes(data)


# --- Kinds of inputs: functions of (random numbers, an empty folder) ------------------------------


def option_values(r: random.Random, folder: Path) -> None:
    """`--config.OPTION=VALUE` on the command line."""
    from jax_ppo.config.command_line import read_command_line
    from jax_ppo.config.option import option_value
    from jax_ppo.config.schema import all_options

    option = r.choice(list(all_options()))
    value = r.choice(TEXTS) if r.random() < 0.5 else str_of(r.choice(NUMBERS))
    # Without generated training data a model is needed, which may be the first thing that is wrong.
    # And a message about several options of a section names the section.
    with naming(option.name, "config.model.path", f"config.{option.name.rpartition('.')[0]}: "):
        config, workdir = read_command_line(
            ["train", "--config=arithmetic", f"--config.{option.name}={value}"]
        )
    result = option_value(config, option.name)
    if isinstance(result, float) and not math.isfinite(result):
        raise Wrong(f"{option.name}={value!r} was accepted as {result}")
    if isinstance(result, str) and result != value:
        raise Wrong(f"{option.name}={value!r} became {result!r}")
    if isinstance(result, int | float) and not isinstance(result, bool):
        if not math.isclose(result, float(value), rel_tol=1e-6):
            raise Wrong(f"{option.name}={value!r} became {result!r}")
    if not workdir.is_relative_to("output"):
        raise Wrong(f"{option.name}={value!r}: the work directory would be {workdir}")


def str_of(number: float) -> str:
    """Return a number as text; Python refuses to print whole numbers of thousands of digits."""
    if isinstance(number, int) and abs(number) > 10**4000:
        return "1" + "0" * 4400
    return str(number)


@functools.cache
def llama_folder() -> Path:
    """Return the folder of a tiny model with its tokenizer, written once per process."""
    from llama_folder import write_arithmetic_llama

    return write_arithmetic_llama(Path(tempfile.mkdtemp(prefix="hostile_llama_")))


def load_llama(folder: Path) -> None:
    """Load the folder as a run would."""
    import jax
    import jax.numpy as jnp

    from jax_ppo.models import heads
    from jax_ppo.models.hf.load import load_checkpoint, read_architecture
    from jax_ppo.models.transformer import Transformer

    architecture = read_architecture(folder)
    model = Transformer(architecture)
    shapes = heads.param_shapes(model, "lm")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    where = jax.tree.map(lambda _: device, shapes)
    params = load_checkpoint(folder, architecture, where, jnp.float32, "lm")
    for leaf in jax.tree.leaves(params):
        if not bool(jnp.isfinite(leaf).all()):
            raise Wrong("weights that are not finite were loaded")


def safetensors_header(r: random.Random, folder: Path) -> None:
    """The header of a weights file, or its bytes."""
    shutil.copy(llama_folder() / "config.json", folder)
    path = Path(shutil.copy(llama_folder() / "model.safetensors", folder))
    end = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    text, body = path.read_bytes()[8:end], path.read_bytes()[end:]
    if r.random() < 0.3:
        path.write_bytes(any_bytes(r, path.read_bytes()))
    else:
        header = json.loads(text)
        name = r.choice(list(header))
        match r.randrange(4):
            case 0:
                header[name] = any_value(r)
            case 1:
                header[name][r.choice(("dtype", "shape", "data_offsets"))] = any_value(r)
            case 2:
                header[r.choice(TEXTS)] = header.pop(name)
            case _:
                header[name]["dtype"] = r.choice(("F64", "BF16", "I32", "F8_E4M3", "BOOL", "U16"))
        text = to_json(header).encode(errors="surrogatepass")
        path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    with naming(str(folder), "model.", "tensor"):
        load_llama(folder)


def chat_templates(r: random.Random, folder: Path) -> None:
    """A tokenizer's chat template."""
    from jax_ppo.data.tokenize_prompts import PromptEncoding, tokenize_prompts
    from jax_ppo.data.tokenizer import load_tokenizer
    from jax_ppo.types import Example

    tokenizer = load_tokenizer(str(llama_folder()))
    pieces = (
        *(
            "{{ messages[0]['content'] }}",
            "{% for m in messages %}",
            "{% endfor %}",
            "{{ m.role }}",
        ),
        *("{{ x.y.z }}", "{{ 1 / 0 }}", "{% raw %}", "{{ ''.__class__.__mro__ }}", "\x1b[2J", "{{"),
        *("{% include 'x' %}", "{{ range(10**12) | list }}", "{{ raise_exception('no') }}", "A"),
        *("{% for i in range(10**9) %}x{% endfor %}", "{{ 'a' * 10**6 }}", "{{ cycler.__init__ }}"),
    )
    tokenizer.chat_template = "".join(r.choice(pieces) for _ in range(r.randrange(1, 4)))
    messages = ({"role": "user", "content": "2+2?"},)
    example = Example(prompt=messages, data_source="gsm8k", ground_truth="4", extra_info={})
    with naming("chat template", "chat_template", "config.data"):
        tokenize_prompts([example] * 2, tokenizer, PromptEncoding(max_prompt_length=64))


def tokenizer_files(r: random.Random, folder: Path) -> None:
    """The files of a tokenizer."""
    from jax_ppo.data.tokenizer import load_tokenizer

    for file in llama_folder().glob("*token*"):
        shutil.copy(file, folder)
    name = r.choice(sorted(file.name for file in folder.iterdir()))
    path = folder / name
    if r.random() < 0.4:
        path.write_bytes(any_bytes(r, path.read_bytes()))
    else:
        content = json.loads(path.read_text()) if path.suffix == ".json" else {}
        if isinstance(content, dict) and content:
            content[r.choice([*content, "auto_map"])] = any_value(r)
        path.write_text(to_json(content))
    with naming(str(folder)):
        tokenizer = load_tokenizer(str(folder))
    tokenizer.encode("2+2?")


KINDS: dict[str, Callable[[random.Random, Path], None]] = {
    "option values": option_values,
    "safetensors": safetensors_header,
    "chat templates": chat_templates,
    "tokenizer files": tokenizer_files,
}


# --- Judging --------------------------------------------------------------------------------------


class Refused(Exception):
    """The package refused the input, in the form it should."""


@contextlib.contextmanager
def naming(*names: str) -> Iterator[None]:
    """Turn a `UserError` into `Refused` if it is one line that contains one of the names."""
    from jax_ppo.errors import UserError

    try:
        yield
    except UserError as error:
        text = str(error)
        one_line(text)
        if not any(name in text for name in names):
            raise Wrong(f"refused, but none of {names} is named: {text:.300}") from None
        raise Refused(text) from None


def one_line(text: str) -> None:
    """Raise `Wrong` for text that is not a line of printable characters, or too long."""
    if not text.isprintable():
        raise Wrong(f"the message is not one printable line: {text!r:.300}")
    if len(text) > 20_000:
        raise Wrong(f"the message has {len(text)} characters: {text!r:.100}")


class TooLong(BaseException):
    """An input took longer than `SECONDS`; not an Exception, which the package would catch."""


def judge(kind: str, number: int, seed: int, outside: Path) -> tuple[str, str]:
    """Run one input; return its outcome and, if it failed, why."""
    r = random.Random(f"{seed}/{kind}/{number}")
    before = sorted(outside.iterdir())

    def stop(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, stop)
    with tempfile.TemporaryDirectory(prefix="hostile_") as name:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                KINDS[kind](r, Path(name))
            outcome, why = ACCEPTED, ""
        except Refused:
            outcome, why = REFUSED, ""
        except TooLong:
            outcome, why = FAILED, f"took longer than {SECONDS:g} s"
        except Wrong as error:
            outcome, why = FAILED, str(error)
        except BaseException as error:
            outcome, why = FAILED, f"{type(error).__name__}: {error!s:.300}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    if "Traceback" in output.getvalue():
        outcome, why = FAILED, f"printed a traceback: {output.getvalue():.300}"
    if sorted(outside.iterdir()) != before:
        outcome, why = FAILED, "wrote outside its folder"
    if children := Path(f"/proc/self/task/{os.getpid()}/children"):
        if children.exists() and children.read_text().strip():
            outcome, why = FAILED, f"left processes behind: {children.read_text()}"
    return outcome, why


def run_kind(kind: str, numbers: range, seed: int, outside: Path) -> int:
    """Judge inputs of one kind, print a row and a line per failure, and return their number."""
    # The first inputs pay for imports and compiled programs, which are not their own.
    for warm_up in range(20):
        with contextlib.suppress(BaseException):
            with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
                KINDS[kind](random.Random(warm_up), Path(name))
    counts: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    lines = []
    for number in numbers:
        # The last line that is left of a run that an input has killed.
        print(f"--kind '{kind}' --only {number}", file=sys.stderr)
        faulthandler.dump_traceback_later(HANG, exit=True)
        start = time.monotonic()
        outcome, why = judge(kind, number, seed, outside)
        slowest = max(slowest, time.monotonic() - start)
        counts[outcome] += 1
        if outcome == FAILED:
            lines.append(f"  --kind '{kind}' --only {number}: {why!r:.400}")
    print(
        f"{kind:22} {counts.total():7} {counts[ACCEPTED]:9} {counts[REFUSED]:8} "
        f"{counts[FAILED]:7} {slowest:6.2f} s",
        *lines,
        sep="\n",
        flush=True,
    )
    return counts[FAILED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="these kinds alone")
    parser.add_argument("--only", type=int, help="the number of one input")
    arguments = parser.parse_args()
    kinds = arguments.kind or list(KINDS)
    each = -(-arguments.inputs // len(kinds))
    numbers = range(each) if arguments.only is None else range(arguments.only, arguments.only + 1)
    logging.disable(logging.CRITICAL)
    print(f"{'kind':22} {'inputs':>7} {'accepted':>9} {'refused':>8} {'failed':>7} {'slowest':>8}")
    with tempfile.TemporaryDirectory(prefix="hostile_") as root:
        # All temporary files are below `root`.
        tempfile.tempdir = root
        outside = Path(tempfile.mkdtemp(prefix="cwd_"))
        os.chdir(outside)
        failures = sum(run_kind(kind, numbers, arguments.seed, outside) for kind in kinds)
        os.chdir("/")
    print(f"{failures} of {each * len(kinds)} inputs failed (seed {arguments.seed})")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
