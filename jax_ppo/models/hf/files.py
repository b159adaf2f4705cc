"""safetensors files: read slice by slice, written one tensor at a time."""

import contextlib
import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jax_ppo.errors import UserError
from jax_ppo.models.hf.json_files import quote_value, read_json_object
from jax_ppo.models.hf.mxfp4 import BLOCKS, SCALES, Mxfp4Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SAFETENSORS_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
# Bits of each type without the sign, and of infinity. Larger patterns are NaN.
MAGNITUDE_BITS: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    "F32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
}
# Values that are examined at a time, so that they stay in the processor's cache.
BLOCK_SIZE = 1 << 18
# Bytes of a tensor that are compared at a time.
COMPARED_BYTES = 1 << 26
# How transformers is told to dequantize a checkpoint, by its `quant_method`.
DEQUANTIZING_CONFIGS = {
    "compressed-tensors": "CompressedTensorsConfig",
    "fp8": "FineGrainedFP8Config",
    "mxfp4": "Mxfp4Config",
}
DEQUANTIZE = "Dequantize it once with transformers 5, and give the folder `converted`"


class StoredTensor(NamedTuple):
    """Where a tensor is stored."""

    file: Any  # open
    file_name: str
    name: str  # in the file
    scales: Any = None  # the `StoredTensor` of the powers of two that belong to numbers in MXFP4

    def open(self) -> Any:
        """Return the tensor as an open slice."""
        values = self.file.get_slice(self.name)
        return values if self.scales is None else Mxfp4Tensor(values, self.scales.open())


class SafetensorsCheckpoint:
    """The tensors of a folder's safetensors files, as a context manager.

    While it is open, the files are memory-mapped; reading a slice of a tensor only touches the
    bytes of that slice.
    """

    def __init__(
        self,
        folder: str | Path,
        files: Sequence[Path] | None = None,
        rename: Callable[[str], str] = str,
    ) -> None:
        """Open `files` of a folder; `None`: those that `find_weight_files` returns.

        `rename` maps a tensor's name in the files to its name here; "" leaves the tensor out.
        Raise `UserError` if files are incomplete, or hold different tensors of the same name.
        """
        self.folder = Path(folder)
        self._tensors: dict[str, StoredTensor] = {}
        if files is None:
            files = find_weight_files(self.folder)
        with contextlib.ExitStack() as opening:
            for path in files:
                try:
                    file = opening.enter_context(safe_open(path, framework="numpy"))
                except (SafetensorError, OSError) as error:
                    raise UserError(
                        f"{path} is not a whole safetensors file ({error}). If it was downloaded "
                        "or cloned, that stopped early or left a Git LFS pointer: fetch it again"
                    ) from error
                for stored_name in file.keys():
                    name = rename(stored_name)
                    if name in self._tensors and not _slices_are_equal(
                        self._slice(name), file.get_slice(stored_name)
                    ):
                        raise UserError(
                            f"{self.folder}: {self.file(name)} and {path.name} hold different "
                            f"tensors named {name}, so it is unclear which one belongs to the "
                            "model"
                        )
                    if name:
                        self._tensors[name] = StoredTensor(file, path.name, stored_name)
            self._join_mxfp4()
            self._stack = opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._tensors.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._tensors)

    def file(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._tensors[name].file_name

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the type of a tensor as safetensors spells it: "F32", "BF16", "I8", ..."""
        return self._slice(name).get_dtype()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a block of a tensor: one slice per dimension, or () for the whole tensor."""
        return self._slice(name)[index or ...]

    def read_finite(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a block of a tensor as `read` does; raise `UserError` if it has NaN or infinity."""
        values = self.read(name, index)
        if not is_finite(values, self.dtype(name)):
            raise UserError(
                f"{self.folder / self.file(name)}: {name} has values that are not finite (NaN or "
                "infinity)"
            )
        return values

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same type, shape and bytes."""
        return _slices_are_equal(self._slice(name), self._slice(other))

    def _join_mxfp4(self) -> None:
        """Take the two tensors of experts in MXFP4 for one in bfloat16."""
        for name in [name for name in self._tensors if name.endswith(BLOCKS)]:
            whole = name.removesuffix(BLOCKS)
            scales = self._tensors.get(whole + SCALES)
            joined = self._tensors[name]._replace(scales=scales)
            if scales is not None and whole not in self._tensors and joined.open().is_valid:
                del self._tensors[name], self._tensors[whole + SCALES]
                self._tensors[whole] = joined

    def _slice(self, name: str) -> Any:
        return self._tensors[name].open()


def is_finite(values: np.ndarray, code: str) -> bool:
    """Return whether an array has neither NaN nor infinity.

    The bits are compared as integers, which costs about as much as reading them from memory.
    The array is contiguous, and `code` its type, a key of `SAFETENSORS_DTYPES`.
    """
    integer, magnitude, infinity = MAGNITUDE_BITS[code]
    bits = values.reshape(-1).view(integer)
    starts = range(0, bits.size, BLOCK_SIZE)
    return all((bits[i : i + BLOCK_SIZE] & magnitude).max() < infinity for i in starts)


def _slices_are_equal(one: Any, other: Any) -> bool:
    """Return whether two open tensors of safetensors have the same type, shape and bytes."""
    shape = one.get_shape()
    if shape != other.get_shape() or one.get_dtype() != other.get_dtype():
        return False
    if 0 in shape:
        return True
    if not shape:
        return one[...].tobytes() == other[...].tobytes()
    # A few rows at a time, because an embedding may be larger than the free memory.
    rows = max(1, COMPARED_BYTES // one[:1].nbytes)
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])  # safetensors refuses a slice beyond the end
        if one[start:stop].tobytes() != other[start:stop].tobytes():
            return False
    return True


def find_weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights.

    Raise `UserError` if there are none, only pickles, or some are missing, or if the index names
    something other than files of this folder.
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
    """Return the sorted names of the files in an index; raise `UserError` if it is invalid."""
    weight_map = read_json_object(path).get("weight_map", {})
    if not isinstance(weight_map, dict):
        raise UserError(f"{path}: weight_map must be an object, it is {quote_value(weight_map)}")
    for tensor, name in weight_map.items():
        # A name is nothing but a name: a path could lead out of the folder.
        if not isinstance(name, str) or not _is_file_name(name):
            raise UserError(
                f"{path}: weight_map must name files of this folder, it names "
                f"{quote_value(name)} for {quote_value(tensor)}"
            )
    return sorted(set(weight_map.values()))


def _is_file_name(name: str) -> bool:
    """Return whether a string names a file of its folder, in at most the 255 bytes of Linux."""
    if name in ("", ".", "..") or re.search(r"[/\\]", name) or not name.isprintable():
        return False
    return len(name.encode()) <= 255


def _missing_weights_error(folder: Path) -> UserError:
    """Return the error of a folder without safetensors, with the lines that convert pickles."""
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
    problem = f"{folder}: quantization_config {quote_value(quantization)} is not supported"
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
    """Return the class by which transformers loads a folder."""
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


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], arrays: Iterable[np.ndarray]
) -> None:
    """Write a safetensors file with one array in memory at a time, unlike `save_file`.

    `tensors` maps names to (type as safetensors spells it, shape), in the order of `arrays`, which
    have any memory layout and are consumed to their end.
    """
    # transformers refuses a file without this metadata.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start = end
        end = start + int(np.prod(shape)) * SAFETENSORS_DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        # `strict` asks for the end of `arrays`, too.
        for (dtype, shape), array in zip(tensors.values(), arrays, strict=True):
            assert array.dtype == SAFETENSORS_DTYPES[dtype] and array.shape == tuple(shape)
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
