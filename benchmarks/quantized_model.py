"""Carry a quantized model to a machine without a network, in small pieces, and restore it there.

    python benchmarks/quantized_model.py pack MODEL.gguf PIECES --mib 60   # where the file is
    python benchmarks/quantized_model.py unpack PIECES MODEL FOLDER        # where the model is used

`pack` writes the quantized blocks of a GGUF file of a Llama or a Qwen2 as safetensors files of
bytes. `unpack` dequantizes them to bfloat16, into a copy of MODEL: the folder of the same model's
config.json and tokenizer, without weights. A model whose input and output embeddings are tied
(config.json) takes the output embedding of the file, which is stored with more bits, for both.
Requires gguf, NumPy and safetensors.
"""

import argparse
import concurrent.futures
import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("gguf", type=Path)
    packing.add_argument("pieces", type=Path)
    packing.add_argument("--mib", type=float, default=60, help="largest size of a piece")
    packing.add_argument("--tied", action="store_true", help="leave the input embedding out")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("pieces", type=Path)
    unpacking.add_argument("model", type=Path)
    unpacking.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "pack":
        pack(args.gguf, args.pieces, int(args.mib * 2**20), args.tied)
    else:
        unpack(args.pieces, args.model, args.folder)


def pack(gguf: Path, folder: Path, limit: int, tied: bool) -> None:
    """Write the tensors of a GGUF file as pieces of at most `limit` bytes."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    folder.mkdir(parents=True, exist_ok=True)
    pieces: list[dict[str, np.ndarray]] = [{}]
    types: list[dict[str, str]] = [{"architecture": architecture}]
    room = limit
    for tensor in sorted(reader.tensors, key=lambda tensor: -tensor.n_bytes):
        if tied and tensor.name == "token_embd.weight":
            continue
        rows = tensor.data.reshape(-1, tensor.data.shape[-1]).view(np.uint8)
        # A table of embeddings is larger than a piece.
        step = max(1, limit // 8 // rows.shape[1])
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            size = part.nbytes + 1024
            if size > room:
                pieces.append({})
                types.append({"architecture": architecture})
                room = limit
            room -= size
            name = f"{tensor.name}@{start}"
            pieces[-1][name] = np.ascontiguousarray(part)
            types[-1][name] = tensor.tensor_type.name
    for number, (piece, metadata) in enumerate(zip(pieces, types, strict=True)):
        save_file(piece, folder / f"piece{number:02d}.safetensors", metadata=metadata)
        print(f"piece{number:02d}: {sum(x.nbytes for x in piece.values()) / 2**20:.1f} MiB")


def dequantize_piece(path: Path) -> tuple[str, dict[str, np.ndarray]]:
    """Return a piece's architecture, and its tensors in bfloat16 by name and first row."""
    from gguf import GGMLQuantizationType, dequantize

    with safe_open(path, "numpy") as file:
        types = file.metadata()
        parts = {}
        for name in file.keys():
            kind = GGMLQuantizationType[types[name]]
            data = file.get_tensor(name)
            if kind == GGMLQuantizationType.F32:
                data = data.view(np.float32)
            parts[name] = dequantize(data, kind).astype(ml_dtypes.bfloat16)
    return types["architecture"], parts


def unpack(pieces: Path, model: Path, folder: Path) -> None:
    """Write the model of the pieces as a Hugging Face folder."""
    paths = sorted(pieces.glob("piece*.safetensors"))
    with concurrent.futures.ProcessPoolExecutor(max_workers=8) as pool:
        results = list(pool.map(dequantize_piece, paths))
    config = json.loads((model / "config.json").read_text())
    tensors: dict[str, list[tuple[int, np.ndarray]]] = {}
    for _, parts in results:
        for name, part in parts.items():
            name, _, start = name.partition("@")
            tensors.setdefault(name, []).append((int(start), part))
    weights = {}
    for name, parts in tensors.items():
        whole = np.concatenate([part for _, part in sorted(parts, key=lambda part: part[0])])
        if results[0][0] == "llama" and re.search(r"attn_[qk]\.", name):
            heads = config["num_attention_heads" if "attn_q" in name else "num_key_value_heads"]
            whole = restore_rotary_order(whole, heads)
        if name.endswith(".bias") or "norm" in name:
            whole = whole.reshape(-1)
        weights[hugging_face_name(name)] = whole
    if config["tie_word_embeddings"]:
        head = weights.pop("lm_head.weight", None)
        weights.setdefault("model.embed_tokens.weight", head)
    shutil.copytree(model, folder, dirs_exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    print(f"{folder}: {sum(x.size for x in weights.values()) / 1e6:.0f} million weights")


def hugging_face_name(name: str) -> str:
    """Return the name of a GGUF file's tensor in a Hugging Face folder."""
    if name in NAMES:
        return NAMES[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def restore_rotary_order(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a Llama's queries or keys with the halves of each head apart.

    GGUF files interleave them.
    """
    pairs = weights.reshape(heads, len(weights) // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weights.shape)


if __name__ == "__main__":
    main()
