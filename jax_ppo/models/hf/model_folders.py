"""Location of a checkpoint: a local folder, a bucket, or a repository of the Hugging Face hub."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_ppo.errors import UserError, nearest_name, shorten
from jax_ppo.models.hf.fields import read_json_object
from jax_ppo.storage import downloads, hub, local_files, remote
from jax_ppo.storage.local_files import expand_local_path

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# How transformers is told to dequantize a checkpoint, by its `quant_method`.
DEQUANTIZING_CONFIGS = {
    "compressed-tensors": "CompressedTensorsConfig",
    "fp8": "FineGrainedFP8Config",
    "mxfp4": "Mxfp4Config",
}
DEQUANTIZE = "Dequantize it once with transformers 5, and give the folder `converted`"

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
HUB_FILES = [
    "*.json",
    "model*.safetensors",
    "adapter_model.safetensors",
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges*",
    "*.jinja",
]
TEMPLATE_SUFFIX = ".jinja"
# Files in folders of a repository, such as other formats of the weights, are left out unless they
# are chat templates: one pattern for each character in which the end of a name can differ.
IGNORED_HUB_FILES = [
    f"*/*[!{character}]{TEMPLATE_SUFFIX[i + 1 :]}" for i, character in enumerate(TEMPLATE_SUFFIX)
]


def resolve_model_folder(
    path: str,
    what: str = "config.model.path",
    holds: str = "config.json and model.safetensors",
    files: Sequence[str] = HUB_FILES,
) -> Path:
    """Return the folder of a checkpoint, downloading it unless it is local or cached.

    Args:
      path: A local folder, an address such as gs://BUCKET/FOLDER, or a hub name: OWNER/NAME, or
        OWNER/NAME@REVISION with a branch, tag or commit.
      what: name of the option, for error messages.
      holds: what such a folder holds, for error messages.
      files: patterns of the files to download.

    Raises:
      UserError: there is no such folder, repository of the hub or accessible bucket, or the hub
        does not answer within about `hub.TIMEOUT_SECONDS` seconds.
    """
    if not path:
        raise UserError(f"{what}='': must be set to a Hugging Face folder or hub name")
    if remote.is_address(path):
        return downloads.download_folder(path, what, files)
    folder = expand_local_path(path, what)
    if folder.is_dir():
        _refuse_run(folder, f"{what}={path!r}")
        return folder
    wanted = ""
    if files != HUB_FILES:  # the description of a model is enough
        holds, wanted = "config.json, which is enough here", f" {files[0]}"
    problem = f"{what}={path!r}: "
    remedy = f"set {what} to a folder with {holds}"
    if nearest := _nearest_folder(folder):
        remedy += f" (the nearest one here is {nearest})"
    if folder.suffix == ".gguf" and folder.is_file():
        raise gguf_error(folder)
    if folder.is_file():
        raise UserError(f"{problem}this is a file; {remedy}")
    missing = f"{problem}there is no such folder (looked from {Path.cwd()}), and"
    if not HUB_NAME.fullmatch(path):
        raise UserError(f"{missing} the path is not a hub name, OWNER/NAME; {remedy}")
    name, revision = hub.split_revision(path)
    command = (
        f"hf download {name}{wanted} --revision {revision} --local-dir {name.rpartition('/')[2]}"
    )
    try:
        return hub.download_snapshot(path, files, what, ignore=IGNORED_HUB_FILES)[0]
    except hub.HubError as error:
        raise UserError(
            f"{missing} {error.reason}. Either {remedy}; or get one, where the hub can be reached, "
            f"with `{command}`"
        ) from error


def _refuse_run(folder: Path, setting: str) -> None:
    """Raise `UserError` for the work directory of a run, or a checkpoint in it: no models."""
    run = folder.parents[1] if folder.parent.name == local_files.CHECKPOINTS else folder
    if not (run / "training_metrics.csv").exists() or any(folder.glob("*.safetensors")):
        return
    remedy = "it has exported no model, as a run does after its last step (config.trainer.export)"
    if models := sorted(str(file.parent) for file in run.glob("*/config.json")):
        remedy = f"a model of it is {', '.join(models)}"
    elif steps := [int(x.name) for x in run.glob("checkpoints/*") if x.name.isdecimal()]:
        remedy += f"; evaluate and score take {run / local_files.CHECKPOINTS / str(max(steps))}"
    kind = "the work directory" if run == folder else "a checkpoint"
    raise UserError(f"{setting}: is {kind} of a run; {remedy}")


def shareable_model_name(path: str, folder: Path) -> tuple[str, str | None]:
    """Return the name by which others find a model, and its revision on the hub.

    The name is that of the hub, or an address or absolute path, which have `None` for a revision.
    `resolve_model_folder` has returned `folder` for `path`, which is "" for a folder of this run.
    """
    if remote.is_address(path):
        return path, None
    if not path or Path(path).expanduser().is_dir():
        return str(folder.resolve()), None
    return hub.split_revision(path)


def _nearest_folder(folder: Path) -> Path | None:
    parts = list(folder.parts)
    parent = Path(folder.anchor or ".")
    while parts and (parent / parts[0]).is_dir():
        parent /= parts.pop(0)
    try:
        names = [entry.name for entry in os.scandir(parent) if entry.is_dir()]
    except OSError:
        return None
    if not parts or not (nearest := nearest_name(parts[0], names)):
        return None
    complete = (parent / nearest).joinpath(*parts[1:])
    return complete if complete.is_dir() else parent / nearest


def find_weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights.

    Raise `UserError` if some are missing, all are pickles, or the index names other files.
    """
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).exists():
        raise _missing_weights_error(folder)
    files = [folder / name for name in _read_index(folder / INDEX_FILE)]
    missing = [path.name for path in files if not path.exists()]
    if missing or not files:
        raise UserError(
            f"{folder / INDEX_FILE} names {len(files)} files, of which {len(missing)} are not "
            f"there: {', '.join(missing[:4])}. Fetch them again"
        )
    return files


def _read_index(path: Path) -> list[str]:
    weight_map = read_json_object(path).get("weight_map", {})
    if not isinstance(weight_map, dict):
        raise UserError(f"{path}: weight_map must be an object; it is {shorten(repr(weight_map))}")
    for tensor, name in weight_map.items():
        # A path could lead out of the folder; Linux takes at most 255 bytes.
        is_name = isinstance(name, str) and name.isprintable() and len(name.encode()) <= 255
        if not is_name or name in ("", ".", "..") or re.search(r"[/\\]", name):
            raise UserError(
                f"{path}: weight_map must name files of this folder; it names "
                f"{shorten(repr(name))} for {shorten(repr(tensor))}"
            )
    return sorted(set(weight_map.values()))


def _missing_weights_error(folder: Path) -> UserError:
    patterns = ("pytorch_model*", "*.pth", "*.pt")
    pickles = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    # Pickles are not downloaded. The hub's cache has the repository's name in the path.
    cached = re.search(r"models--([^/]+)/snapshots/\w+$", folder.as_posix())
    source = cached[1].replace("--", "/") if cached else str(folder)
    if gguf := sorted(folder.glob("*.gguf")):
        return gguf_error(gguf[0])
    found = f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}"
    if pickles:
        found = f"{folder} has its weights only in {pickles[0]}, a pickle"
    elif not cached:
        return UserError(found)
    return UserError(
        f"{found}. A pickle such as pytorch_model.bin is not read, because reading it would run "
        "whatever code it holds. If you trust it, convert it once where torch is installed, and "
        "give the folder `converted`:",
        details=_conversion(source, _loader(folder)),
    )


def without_quantization(config: dict[str, Any], folder: Path, reads_mxfp4: bool) -> dict[str, Any]:
    """Return config.json without `quantization_config` if the weights are read as if it had none.

    Raise `UserError` otherwise, with the lines that dequantize them if any do.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return config
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method == "mxfp4" and reads_mxfp4:
        return {name: x for name, x in config.items() if name != "quantization_config"}
    problem = f"{folder}: quantization_config {shorten(repr(quantization))} is not supported"
    if method == "bitsandbytes":
        lines = _conversion(str(folder), _loader(folder), after=".dequantize()")
    elif method in DEQUANTIZING_CONFIGS:
        option = f"quantization_config=transformers.{DEQUANTIZING_CONFIGS[method]}(dequantize=True)"
        lines = _conversion(str(folder), _loader(folder), option)
    else:
        raise UserError(f"{problem}; take the model's checkpoint in float32 or bfloat16")
    raise UserError(f"{problem}. {DEQUANTIZE}:", details=lines)


def gguf_error(path: Path) -> UserError:
    """Return the error of a GGUF file, with the lines that dequantize it."""
    name = f"gguf_file={path.name!r}"
    option = f"{name}, quantization_config=transformers.GgufConfig(dequantize=True)"
    return UserError(
        f"{path} is in the format GGUF, which is not read. {DEQUANTIZE} (with the package gguf):",
        details=_conversion(
            str(path.parent), "AutoModelForCausalLM", option, tokenizer_options=name
        ),
    )


def _loader(folder: Path) -> str:
    config = folder / "config.json"
    description = config.read_text(encoding="utf-8") if config.exists() else ""
    for task in ("SequenceClassification", "TokenClassification"):
        if f"For{task}" in description:
            return f"AutoModelFor{task}"
    return "AutoModelForCausalLM"


def _conversion(
    source: str, loader: str, options: str = "", after: str = "", tokenizer_options: str = ""
) -> str:
    """Return the lines of Python that save a checkpoint as safetensors in float."""
    model = ", ".join(filter(None, ("source", options)))
    tokenizer = ", ".join(filter(None, ("source", tokenizer_options)))
    return (
        f"    import transformers\n    source = {source!r}\n"
        f'    transformers.{loader}.from_pretrained({model}){after}.save_pretrained("converted")\n'
        f'    transformers.AutoTokenizer.from_pretrained({tokenizer}).save_pretrained("converted")'
    )
