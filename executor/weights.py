"""Read weights from safetensors folders and GGUF files, one tensor at a time, under their Hugging Face names.

Nothing is unpickled and no code of a model is run. Whatever is wrong with a file ends in one `ModelError`.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leftfold.executor import config as configs
from leftfold.executor.config import ModelConfig
from leftfold.executor.errors import ModelError

_READ_ERRORS = (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError)

_LONG = 1024
"""Elements of a metadata array that nobody here reads."""
_WHOLE = ("F64", "F32", "F16", "BF16")
_GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs": "rope_freqs.weight",
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to be built: its configuration and where its tensors come from.

    `has(name)`, `get(name)`: by Hugging Face name; `get` reads (and dequantizes) at every call. `"rope_freqs"`
    [head_dim / 2]: divisors of the rotation speeds, in some GGUF files. `source`: the path that opens it again.
    `quantized`: its file holds matrices in fewer than 16 bits.
    """

    config: ModelConfig
    has: Callable[[str], bool]
    get: Callable[[str], torch.Tensor]
    source: Path | None = None
    quantized: bool = False

    def files(self) -> list[Path]:
        """The files that decide what this model is; none if it was not opened from any."""
        if self.source is None or self.source.is_file():
            return [] if self.source is None else [self.source]
        return [self.source / "config.json", *sorted(self.source.glob("*.safetensors"))]

    def expect(self, name: str, *shape: int) -> torch.Tensor:
        """`get`, with the shape checked. Raises `ModelError` if the tensor is missing or has another shape."""
        if not self.has(name):
            raise ModelError(f"the model's files lack the tensor {name!r}")
        tensor = self.get(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name!r} has shape {tuple(tensor.shape)}; its configuration says {shape}")
        return tensor


def load(path: str | Path) -> LoadedModel:
    """Open a GGUF file, or a folder with config.json and safetensors (or with a single GGUF file).

    Tensors are read later. Raises `ModelError` if there is no model, it cannot be read or is not supported.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is no model: expected a .gguf file or a folder with safetensors")
        return _open_gguf(path)
    if not path.is_dir():
        raise ModelError(f"there is no model at {path}")
    if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
        return _open_safetensors(path)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _open_gguf(found[0])
    if found:
        raise ModelError(f"{path} holds {len(found)} GGUF files; name one: {', '.join(file.name for file in found)}")
    raise ModelError(f"{path} holds neither config.json with *.safetensors nor a .gguf file")


def _open_safetensors(folder: Path) -> LoadedModel:
    from safetensors import SafetensorError, safe_open

    config = configs.from_hugging_face(_read_json(folder / "config.json"))
    places = _safetensors_places(folder)

    def get(name: str) -> torch.Tensor:
        file = places[name]
        try:
            with safe_open(file, framework="pt") as tensors:
                return tensors.get_tensor(name)
        except (SafetensorError, *_READ_ERRORS) as error:
            raise ModelError(f"cannot read tensor {name!r} from {file}: {error}") from None

    return LoadedModel(config, places.__contains__, get, folder.absolute())


def _safetensors_places(folder: Path) -> dict[str, Path]:
    """Tensor name to file, from the headers of the files that an index names, or of all there are."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(_read_json(index).get("weight_map", {}).values())
        strange = sorted(name for name in names if not isinstance(name, str) or Path(name).name != name)
        if strange:
            raise ModelError(f"{index} names files outside its folder: {strange[0]!r}")
        files = [folder / name for name in sorted(names)]
    else:
        whole = folder / "model.safetensors"  # beside it, a model's original files may lie in another layout
        files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    places: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                places.update(dict.fromkeys(tensors.keys(), file))
        except (SafetensorError, *_READ_ERRORS) as error:
            raise ModelError(f"cannot read {file}: {error}") from None
    return places


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file}: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"cannot read {file}: it holds no JSON object")
    return value


def _open_gguf(file: Path) -> LoadedModel:
    try:
        reader = _gguf_reader(file)
        fields = {key: field.contents() for key, field in reader.fields.items() if _is_wanted(key)}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        shapes = {name: tuple(int(size) for size in tensor.shape[::-1]) for name, tensor in tensors.items()}
    except _READ_ERRORS as error:
        raise ModelError(f"cannot read {file}: {_what_is_wrong(file, error)}") from None
    config = configs.from_gguf(fields, shapes)

    def has(name: str) -> bool:
        return _gguf_name(name) in tensors

    def get(name: str) -> torch.Tensor:
        tensor = tensors[_gguf_name(name)]
        try:
            whole = _dequantized(tensor)
        except (*_READ_ERRORS, NotImplementedError) as error:
            what = f"tensor {tensor.name!r} of type {tensor.tensor_type.name}"
            raise ModelError(f"cannot read {what} from {file}: {error}") from None
        if config.family in ("llama", "mistral"):
            whole = _unpermuted(name, whole, config)
        return whole

    few_bits = any(len(tensor.shape) > 1 and tensor.tensor_type.name not in _WHOLE for tensor in tensors.values())
    return LoadedModel(config, has, get, file.absolute(), few_bits)


def _gguf_reader(file: Path) -> Any:
    """A `GGUFReader` that passes over long arrays: a vocabulary takes it seconds, and nobody here asks for one."""
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            begin, number = orig_offs + 12, int(count[0])
            if number < _LONG or int(kind[0]) not in (GGUFValueType.STRING, *self.gguf_scalar_to_np):
                return super()._get_field_parts(orig_offs, raw_type)
            if int(kind[0]) == GGUFValueType.STRING:
                end = _past_strings(self.data, begin, number, ">Q" if self._swapped() else "<Q")
            else:
                end = begin + number * np.dtype(self.gguf_scalar_to_np[GGUFValueType(int(kind[0]))]).itemsize
            return end - orig_offs, [kind, count], [], [GGUFValueType.ARRAY, GGUFValueType(int(kind[0]))]

        def _swapped(self) -> bool:
            return (self.byte_order == "S") != (sys.byteorder == "big")

    return Reader(file)


def _past_strings(data: Any, at: int, count: int, length: str) -> int:
    """The offset behind `count` strings, each with its length before it. Raises ValueError where data ends before."""
    view, size = memoryview(data), len(data)
    for _ in range(count):
        if at + 8 > size:
            raise ValueError("it ends inside an array of strings")
        at += 8 + struct.unpack_from(length, view, at)[0]
    if at > size:
        raise ValueError("it ends inside an array of strings")
    return at


def _what_is_wrong(file: Path, error: Exception) -> str:
    """The reader looks wherever the file says something is; past its end that fails in many words."""
    text = str(error) or type(error).__name__
    if isinstance(error, ValueError | IndexError) and _begins_as_gguf(file):
        return f"it ends too early or is damaged; fetch it again ({text})"
    return text


def _begins_as_gguf(file: Path) -> bool:
    with file.open("rb") as opened:
        return b"GGUF".startswith(opened.read(4))  # or as much of it as is there


def _is_wanted(key: str) -> bool:
    return not key.startswith("tokenizer.") or key.endswith("eos_token_id")


def _gguf_name(name: str) -> str:
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    parts = name.split(".")
    if parts[:2] != ["model", "layers"] or len(parts) < 5:
        return name
    return f"blk.{parts[2]}.{_GGUF_LAYER.get('.'.join(parts[3:-1]), '?')}.{parts[-1]}"


def _dequantized(tensor: Any) -> torch.Tensor:
    from gguf import dequantize

    shape = tuple(int(size) for size in tensor.shape[::-1])
    values = dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(values.reshape(shape).copy())


def _unpermuted(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Undo the interleaving of rotated pairs that GGUF applies to Llama's query and key projections."""
    for projection, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
        if projection in name:
            half = tensor.shape[0] // heads // 2
            return tensor.reshape(heads, half, 2, -1).transpose(1, 2).reshape(tensor.shape)
    return tensor
