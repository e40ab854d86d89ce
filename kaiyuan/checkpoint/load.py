"""Read a torch_dist checkpoint tensor by tensor: no process group, no GPU, no Megatron.

A checkpoint is a folder with a pickled index (``.metadata``) and data files (``*.distcp``), in
which every piece of a tensor is one torch archive at a known offset. Pieces are called chunks here
as they are there; how the ranks of the training split a tensor shows in nothing but them.

The index is read with an unpickler that admits the few plain classes it is made of, and the pieces
with ``weights_only``, so that a checkpoint from elsewhere cannot run code. Objects that are not
tensors (arguments, random states, ``_extra_state``) are never unpickled.
"""

import io
import itertools
import math
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from kaiyuan.checkpoint.names import MEGATRON_LAYERS, VOCABULARY_RULES, Entry, Sizes, entries
from kaiyuan.errors import UserError

INDEX = ".metadata"

_DCP = "torch.distributed.checkpoint"
_ADMITTED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    # The name of the checkpoint's folder; the second is Python 3.13's.
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    # Megatron keeps the plan of each rank in the index.
    *(
        (f"{_DCP}.planner", name)
        for name in (
            "BytesIOWriteData",
            "SavePlan",
            "TensorWriteData",
            "WriteItem",
            "WriteItemType",
        )
    ),
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ADMITTED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


@dataclass(frozen=True)
class Chunk:
    """A piece of a tensor: where it belongs, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """What the index says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class TorchDistCheckpoint:
    """The tensors of one checkpoint folder.

    Attributes:
        folder: the folder of one iteration.
        tensors: every tensor in it, of the model and of the optimizer, by its name.
    """

    def __init__(self, folder: Path) -> None:
        """Read the index and check that all data that it names is there.

        Raises:
            UserError: the index or data is missing or cut short, or the index is not one.
        """
        self.folder = folder
        index = _read_index(folder / INDEX)
        ends: dict[str, int] = {}
        for info in index.storage_data.values():
            end = info.offset + info.length
            ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
        self._check_files(ends)
        places = {(key.fqn, key.offset): info for key, info in index.storage_data.items()}
        self.tensors = {
            name: self._stored_tensor(name, meta, places)
            for name, meta in index.state_dict_metadata.items()
            if isinstance(meta, TensorStorageMetadata)
        }

    def _check_files(self, ends: dict[str, int]) -> None:
        for name, end in sorted(ends.items()):
            # The index is from outside: it must not lead out of its folder.
            if Path(name).name != name:
                raise UserError(f"{self.folder / INDEX} names a file outside of its folder: {name}")
            path = self.folder / name
            if not path.is_file():
                raise UserError(f"{self.folder} is incomplete: {name} is missing")
            size = path.stat().st_size
            if size < end:
                raise UserError(
                    f"{self.folder} is incomplete: {name} has {size:,} bytes of {end:,}"
                )

    def _stored_tensor(
        self, name: str, meta: TensorStorageMetadata, places: dict[Any, Any]
    ) -> StoredTensor:
        chunks = []
        for chunk in meta.chunks:
            place = places.get((name, chunk.offsets))
            if place is None:
                raise UserError(f"{self.folder} is incomplete: a part of {name} has no data")
            chunks.append(
                Chunk(
                    tuple(chunk.offsets),
                    tuple(chunk.sizes),
                    self.folder / place.relative_path,
                    place.offset,
                    place.length,
                )
            )
        return StoredTensor(tuple(meta.size), meta.properties.dtype, tuple(chunks))

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Return a tensor, put together from its chunks.

        Args:
            name: a key of ``tensors``.
            row: return only this index of the leading axis, without the axis; only the chunks
                that hold a part of it are read.

        Raises:
            UserError: the chunks do not cover the tensor exactly, or one of them is damaged.
        """
        stored = self.tensors[name]
        if row is None:
            return _assemble(name, stored.shape, [(c, _read_chunk(c)) for c in stored.chunks])
        held = [
            (c, _read_chunk(c)[row - c.offsets[0]])
            for c in stored.chunks
            if c.offsets[0] <= row < c.offsets[0] + c.sizes[0]
        ]
        return _assemble(
            name,
            stored.shape[1:],
            [(Chunk(c.offsets[1:], c.sizes[1:], c.path, 0, 0), part) for c, part in held],
        )


def _read_index(path: Path) -> Any:
    try:
        with path.open("rb") as stream:
            index = _IndexUnpickler(stream).load()
        # What a file from elsewhere may lack although it can be unpickled.
        _ = index.storage_data.values(), index.state_dict_metadata.items()
        return index
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} is not a complete torch_dist checkpoint: it has no {INDEX}"
        ) from None
    except Exception as error:
        # A damaged pickle can raise almost anything.
        reason = " ".join(str(error).split())
        raise UserError(f"{path} is not the index of a checkpoint: {reason}") from error


class _FilePart(io.RawIOBase):
    """A range of a file as a file, so that torch.load reads it without a copy of all its bytes."""

    def __init__(self, stream: Any, start: int, length: int) -> None:
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        self._stream.seek(self._start + self._at)
        count = self._stream.readinto(view)
        self._at += count
        return count


def _read_chunk(chunk: Chunk) -> Tensor:
    try:
        with chunk.path.open("rb", buffering=0) as stream:
            part = io.BufferedReader(_FilePart(stream, chunk.start, chunk.length))
            tensor = torch.load(part, map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.sizes:
            raise ValueError("it is no tensor, or one of another shape")
        return tensor
    except Exception as error:
        # The archive reader, the unpickler and the file system each have errors of their own.
        raise UserError(
            f"{chunk.path} is damaged: at byte {chunk.start:,} should be a tensor of "
            f"{list(chunk.sizes)}"
        ) from error


def _assemble(name: str, shape: tuple[int, ...], parts: list[tuple[Chunk, Tensor]]) -> Tensor:
    if len(parts) == 1 and parts[0][1].shape == shape:
        return parts[0][1]
    boxes = [list(zip(chunk.offsets, chunk.sizes, strict=True)) for chunk, _ in parts]
    covered = sum(math.prod(chunk.sizes) for chunk, _ in parts)
    inside = all(
        o >= 0 and o + n <= size for b in boxes for (o, n), size in zip(b, shape, strict=True)
    )
    if covered != math.prod(shape) or not inside or _any_overlap(boxes):
        raise UserError(f"the parts of {name} do not make up a tensor of {list(shape)}")
    whole = torch.empty(shape, dtype=parts[0][1].dtype)
    for box, (_, part) in zip(boxes, parts, strict=True):
        whole[tuple(slice(o, o + n) for o, n in box)] = part
    return whole


def _any_overlap(boxes: list[list[tuple[int, int]]]) -> bool:
    """Tell whether two boxes, each an offset and a size in every dimension, share a number."""
    return any(
        all(a < b + m and b < a + n for (a, n), (b, m) in zip(one, other, strict=True))
        for one, other in itertools.combinations(boxes, 2)
    )


class ModelTensors:
    """The model's tensors of a checkpoint, under the names of the table.

    Which of Megatron's forms a checkpoint has (layers stacked or apart, norms fused or not) is
    found out once, here.
    """

    def __init__(self, checkpoint: TorchDistCheckpoint, sizes: Sizes) -> None:
        """Match the checkpoint against the table.

        Raises:
            UserError: a tensor is missing, is left over or has another shape; all are named.
        """
        self.checkpoint = checkpoint
        self.sizes = sizes
        self._places = {entry: self._find(entry) for entry in entries(sizes)}
        self._check()

    def _find(self, entry: Entry) -> tuple[str, int | None] | None:
        """Return the stored name, and the row where layers are stacked."""
        names = [n for n in (entry.rule.megatron, entry.rule.alias) if n is not None]
        stored = self.checkpoint.tensors
        for name in names:
            if entry.layer is None:
                if name in stored:
                    return name, None
            elif f"{MEGATRON_LAYERS}{name}" in stored:
                return f"{MEGATRON_LAYERS}{name}", entry.layer
            elif f"{MEGATRON_LAYERS}{entry.layer}.{name}" in stored:
                return f"{MEGATRON_LAYERS}{entry.layer}.{name}", None
        return None

    def _check(self) -> None:
        folder, stored = self.checkpoint.folder, self.checkpoint.tensors
        missing = [e for e, place in self._places.items() if place is None]
        if missing:
            names = [_full_name(e) for e in missing]
            raise UserError(f"{folder} lacks {len(names)} tensors of the model: {listed(names)}")
        used = {place[0] for place in self._places.values() if place is not None}
        surplus = [name for name in stored if name not in used and is_model_tensor(name)]
        if surplus:
            raise UserError(
                f"{folder} has {len(surplus)} tensors that the model does not have: "
                f"{listed(surplus)}"
            )
        wrong = [text for entry in self._places if (text := self._wrong_shape(entry))]
        if wrong:
            raise UserError(f"{folder} is of another model: {listed(sorted(set(wrong)))}")

    def _wrong_shape(self, entry: Entry) -> str | None:
        name, row = self._place(entry)
        shape = self.checkpoint.tensors[name].shape
        wanted = entry.megatron_shape
        if row is not None:
            wanted = (self.sizes.layers, *wanted)
        fits = shape == wanted
        if entry.rule in VOCABULARY_RULES and len(shape) == 2:
            fits = shape[1] == wanted[1] and self.sizes.may_be_padded_to(shape[0])
        return None if fits else f"{name} is {list(shape)} where {list(wanted)} is due"

    def _place(self, entry: Entry) -> tuple[str, int | None]:
        place = self._places[entry]
        assert place is not None
        return place

    def read(self, entry: Entry) -> Tensor:
        """Return a tensor as Megatron has it, without the padding of the vocabulary.

        Raises:
            UserError: the tensor holds a number that is not finite.
        """
        tensor = self.checkpoint.read(*self._place(entry))
        if entry.rule in VOCABULARY_RULES:
            tensor = tensor[: self.sizes.vocab]
        refuse_non_finite(_full_name(entry), tensor)
        return tensor

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries in the order of the forward pass."""
        return iter(self._places)


def is_model_tensor(name: str) -> bool:
    """Tell the model's tensors from the optimizer's, which stand beside them.

    ``_extra_state`` holds scaling factors of FP8 and is None in all our precisions.
    """
    parts = name.split(".")
    return not any(part == "optimizer" for part in parts[:2]) and "_extra_state" not in name


def refuse_non_finite(name: str, tensor: Tensor) -> None:
    """Raise a UserError when a tensor holds NaN or infinity."""
    # The smallest and the largest are NaN where any number is, and this needs no memory.
    low, high = tensor.aminmax()
    if not (torch.isfinite(low) and torch.isfinite(high)):
        count = int((~torch.isfinite(tensor)).sum())
        raise UserError(f"{name} holds {count:,} numbers that are NaN or infinite")


def listed(names: list[str], most: int = 8) -> str:
    """Join names for an error message, the first few of them when there are many."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _full_name(entry: Entry) -> str:
    prefix = "" if entry.layer is None else f"{MEGATRON_LAYERS}{entry.layer}."
    return prefix + entry.rule.megatron
