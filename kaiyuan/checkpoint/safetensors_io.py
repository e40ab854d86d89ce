"""Write and read safetensors shards tensor by tensor.

The writer of the safetensors package wants all tensors of a shard at once. The format is a length,
a JSON header and the bytes (https://github.com/huggingface/safetensors#format); since all shapes
are known beforehand, the header can be written first and the tensors streamed behind it.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kaiyuan.errors import UserError
from kaiyuan.files import hashed_write

INDEX = "model.safetensors.index.json"

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_FORMAT_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def plan_shards(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, most_bytes: int
) -> list[list[str]]:
    """Divide tensors, in their order, into shards of at most ``most_bytes`` (or one tensor)."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if shards[-1] and filled + size > most_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_shards(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    most_bytes: int = 2_000_000_000,
) -> dict[str, dict[str, Any]]:
    """Write ``tensors`` into numbered shards and an index.

    Args:
        folder: gets the files.
        tensors: names and tensors, in the order of ``shapes``; each is cast to ``dtype``.
        shapes: all names, with their shapes.
        dtype: of the files.
        most_bytes: of tensors in a shard, unless one alone is larger.

    Returns:
        Size and SHA-256 of each shard, by file name.
    """
    shards = plan_shards(shapes, dtype, most_bytes)
    stream = iter(tensors)
    files: dict[str, dict[str, Any]] = {}
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files[file_name] = _write_shard(folder / file_name, names, stream, shapes, dtype)
        weight_map |= dict.fromkeys(names, file_name)
    total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return files


def _write_shard(
    path: Path,
    names: list[str],
    tensors: Iterator[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> dict[str, Any]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        start, end = end, end + math.prod(shapes[name]) * dtype.itemsize
        header[name] = {
            "dtype": _FORMAT_NAMES[dtype],
            "shape": list(shapes[name]),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors start at a multiple of eight
    with hashed_write(path) as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for wanted in names:
            name, tensor = next(tensors)
            if name != wanted or tuple(tensor.shape) != shapes[name]:
                raise RuntimeError(f"{name} {tuple(tensor.shape)} came where {wanted} was planned")
            cast = tensor.to(dtype)
            if dtype == torch.float16 and cast.isinf().any():
                raise UserError(f"{name} holds numbers too large for float16: take another dtype")
            stream.write(cast.contiguous().reshape(-1).view(torch.uint8).numpy())
    return stream.entry()


class Shards:
    """The tensors of a Hugging Face folder.

    Attributes:
        files: the file of each tensor.
    """

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises:
            UserError: there are no safetensors (pickled weights are not read), a file is missing
                or damaged, or a tensor is in two files.
        """
        self.folder = folder
        self.files: dict[str, str] = {}
        for name in self._file_names():
            with self._open(name) as shard:
                for key in shard.keys():  # noqa: SIM118 - it is not a dict
                    if key in self.files:
                        raise UserError(f"{folder}: {key} is both in {self.files[key]} and {name}")
                    self.files[key] = name

    def _file_names(self) -> list[str]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
                names = sorted({str(name) for name in named})
            except (ValueError, KeyError, AttributeError, TypeError) as error:
                raise UserError(f"{index} is not an index of safetensors: {error}") from error
        else:
            names = ["model.safetensors"]
        for name in names:
            if Path(name).name != name or not (self.folder / name).is_file():
                raise UserError(f"{self.folder} is not a complete model: it has no {name}")
        return names

    def _open(self, name: str) -> safe_open:
        try:
            return safe_open(self.folder / name, "pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.folder / name} is damaged: {error}") from error

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header."""
        with self._open(self.files[key]) as shard:
            return tuple(shard.get_slice(key).get_shape())

    def read(self, key: str) -> Tensor:
        """Return a tensor in the type that it is stored in."""
        with self._open(self.files[key]) as shard:
            return shard.get_tensor(key)
