"""safetensors files: a folder's tensors read slice by slice, and written one tensor at a time."""

import contextlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jax_ppo.errors import UserError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SAFETENSORS_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}


class SafetensorsCheckpoint:
    """The tensors of `folder`'s model.safetensors, or of the shards that model.safetensors.index.json names; or of `files`.

    A context manager: the files are mapped while it is open, and a slice of a tensor touches only its own bytes.
    """

    def __init__(self, folder: str | Path, files: Sequence[Path] | None = None):
        """Raises UserError for a folder without whole safetensors files."""
        self.folder = Path(folder)
        self._stack = contextlib.ExitStack()
        self._files = {}
        with contextlib.ExitStack() as opening:
            for path in weight_files(self.folder) if files is None else files:
                try:
                    file = opening.enter_context(safe_open(path, framework="numpy"))
                except SafetensorError as error:
                    raise UserError(
                        f"{path} is not a whole safetensors file ({error}). If it was downloaded or "
                        "cloned, that stopped early or left a Git LFS pointer: fetch it again"
                    ) from error
                for name in file.keys():
                    self._files[name] = (file, path.name)
            self._stack = opening.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._files.clear()
        self._stack.close()

    def names(self) -> set[str]:
        return set(self._files)

    def file(self, name: str) -> str:
        """The file's name within the folder."""
        return self._files[name][1]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """In the format's own spelling: "F32", "BF16", "I8", ..."""
        return self._slice(name).get_dtype()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """The block that `index`, one slice a dimension, takes from the tensor; all of it without."""
        return self._slice(name)[index or (slice(None),)]

    def _slice(self, name):
        return self._files[name][0].get_slice(name)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises UserError where there are none, or only pickles, or one is missing."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).exists():
        _refuse_pickles(folder)
        raise UserError(
            f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} (a hub repository that has them only "
            "in pytorch_model.bin, a pickle, must be converted to safetensors first)"
        )
    weight_map = json.loads((folder / INDEX_FILE).read_text()).get("weight_map", {})
    files = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [path.name for path in files if not path.exists()]
    if missing or not files:
        raise UserError(
            f"{folder / INDEX_FILE} names {len(files)} files, of which {len(missing)} are not there: "
            f"{', '.join(missing[:4])}. Fetch them again"
        )
    return files


def _refuse_pickles(folder):
    pickles = sorted(
        path.name
        for pattern in ("pytorch_model*", "*.pth", "*.pt")
        for path in folder.glob(pattern)
    )
    if pickles:
        config = folder / "config.json"
        scores = config.exists() and "ForSequenceClassification" in config.read_text(
            encoding="utf-8"
        )
        loader = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
        raise UserError(
            f"{folder} has its weights only in {pickles[0]}, a pickle: reading it would run whatever code it holds, so "
            f"it is not read. If you trust it, convert it once where torch is installed:\n"
            f"    model = transformers.{loader}.from_pretrained({str(folder)!r})\n"
            f'    model.save_pretrained("CONVERTED", safe_serialization=True)\n'
            f"and give the folder CONVERTED, with the tokenizer's files copied into it"
        )


def write_safetensors(
    path: Path | None, tensors: dict[str, tuple[str, tuple[int, ...]]], arrays
) -> None:
    """Writes a safetensors file with one array in memory at a time (save_file wants all of them together).

    Args:
      path: of the file; None writes nothing and only draws the arrays.
      tensors: names to (dtype in the format's spelling, shape), in the order of `arrays`.
      arrays: an iterable of the arrays. They are written as they look, whatever their strides.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0  # transformers refuses a file without this
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + int(np.prod(shape)) * SAFETENSORS_DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with contextlib.ExitStack() as stack:
        file = None
        if path is not None:
            file = stack.enter_context(open(path, "wb"))
            file.write(struct.pack("<Q", len(text)) + text)
        for (dtype, shape), array in zip(tensors.values(), arrays, strict=True):
            if file is None:
                continue
            assert array.dtype == SAFETENSORS_DTYPES[dtype] and array.shape == tuple(shape)
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
