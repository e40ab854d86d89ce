"""Megatron's indexed dataset: a ``.bin`` of token ids and an ``.idx`` that says where each lies.

Little-endian layout of the ``.idx`` (megatron-core 0.19.2, datasets/indexed_dataset.py):

======================  =========================================================
9 bytes                 ``MMIDIDX\\0\\0``
uint64                  version, 1
uint8                   code of the type of the ids: 4 = int32, 8 = uint16, ...
uint64, uint64          S, the number of sequences; D, the number of document bounds
S x int32               length of each sequence in ids
S x int64               byte offset of each sequence in the ``.bin``
D x int64               document bounds: document i is sequences [bound i, bound i+1)
======================  =========================================================

Here a document is always one sequence, so D = S + 1.
"""

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kaiyuan.errors import UserError
from kaiyuan.files import HashedStream, hashed_write

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
LENGTHS_OFFSET = _HEADER.size  # bytes before the first length
_CODES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
# The sequence count of one pair is an int32 in Megatron's sample index.
MAX_DOCUMENTS = 2**31 - 1
_SLICE = 4_000_000  # sequences handled at a time, so that a big index needs little memory


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type that Megatron stores ids of such a vocabulary in: uint16 below 65,500."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedWriter:
    """Streams documents into a ``.bin``; made by `write_indexed`."""

    def __init__(self, stream: HashedStream, dtype: np.dtype[Any], vocab_size: int) -> None:
        self._stream = stream
        self._dtype = dtype
        self._limit = min(vocab_size, np.iinfo(dtype).max + 1)
        self._lengths: list[NDArray[np.int32]] = []
        self.num_documents = 0
        self.num_tokens = 0

    def add(self, ids: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Append documents.

        Args:
            ids: integers of shape [total]; the documents' ids one after another.
            lengths: ids of each document, shape [documents]; their sum is ``total``.

        Raises:
            ValueError: an id outside the vocabulary, or lengths that do not add up.
        """
        if int(lengths.sum()) != len(ids):
            raise ValueError(f"lengths add up to {lengths.sum()}, but there are {len(ids)} ids")
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self._limit):
            raise ValueError(f"ids {ids.min()} to {ids.max()} do not fit below {self._limit}")
        if len(lengths) and int(lengths.max()) > np.iinfo(np.int32).max:
            raise ValueError("a document has more than 2^31 - 1 tokens")
        self._stream.write(np.ascontiguousarray(ids, self._dtype))
        self._lengths.append(lengths.astype("<i4"))
        self.num_documents += len(lengths)
        self.num_tokens += len(ids)
        if self.num_documents > MAX_DOCUMENTS:
            raise UserError("one file pair holds at most 2^31 - 1 documents: leave out --single")

    def write_index(self, stream: HashedStream) -> None:
        """Write the ``.idx`` of what was added."""
        count = self.num_documents
        code = next(c for c, name in _CODES.items() if np.dtype(f"<{name}") == self._dtype)
        stream.write(_HEADER.pack(MAGIC, VERSION, code, count, count + 1))
        for lengths in self._lengths:
            stream.write(lengths)
        offset = 0
        for lengths in self._lengths:
            ends = np.cumsum(lengths, dtype="<i8") * self._dtype.itemsize + offset
            stream.write(np.concatenate(([offset], ends[:-1])).astype("<i8"))
            offset = int(ends[-1])
        for start in range(0, count + 1, _SLICE):
            stream.write(np.arange(start, min(start + _SLICE, count + 1), dtype="<i8"))


@contextlib.contextmanager
def write_indexed(
    prefix: Path, dtype: np.dtype[Any], vocab_size: int, entries: dict[str, Any]
) -> Iterator[IndexedWriter]:
    """Write ``prefix.bin`` and ``prefix.idx``, each atomically, the index last.

    Args:
        prefix: path without the suffix.
        dtype: the type of the ids on the disk (see `id_dtype`).
        vocab_size: ids must be below it.
        entries: receives ``{"bin": {"size", "sha256"}, "idx": ...}``.

    Raises:
        ValueError: nothing was added; Megatron cannot open an empty ``.bin``.
    """
    with hashed_write(prefix.with_name(prefix.name + ".bin")) as stream:
        writer = IndexedWriter(stream, dtype, vocab_size)
        yield writer
        if writer.num_tokens == 0:
            raise ValueError(f"{prefix}: no documents")
        entries["bin"] = stream.entry()
    with hashed_write(prefix.with_name(prefix.name + ".idx")) as stream:
        writer.write_index(stream)
        entries["idx"] = stream.entry()


class IndexedReader:
    """A read-only, memory-mapped view of a file pair.

    Attributes:
        lengths: int32 [sequences], ids of each.
        pointers: int64 [sequences], byte offset of each in the ``.bin``.
        documents: int64 [documents + 1], bounds in sequences.
        ids: the whole ``.bin`` as one array.
    """

    def __init__(self, prefix: Path) -> None:
        """Open the pair and check its header and sizes; `check` looks at every entry.

        Raises:
            UserError: a file is missing, is not of this format, or is cut short or too long.
        """
        self.prefix = prefix
        self._idx = prefix.with_name(prefix.name + ".idx")
        self._bin = prefix.with_name(prefix.name + ".bin")
        index = _map(self._idx)
        if len(index) < _HEADER.size:
            raise UserError(f"{self._idx} is cut short: it has no whole header")
        magic, version, code, sequences, bounds = _HEADER.unpack_from(index)
        if magic != MAGIC:
            raise UserError(f"{self._idx} is not a Megatron index: it begins with {magic!r}")
        if version != VERSION or code not in _CODES:
            raise UserError(f"{self._idx} has version {version} and type {code}: not supported")
        # Counts are read from the file: compare in Python's integers, which cannot wrap.
        if len(index) != _HEADER.size + 12 * sequences + 8 * bounds or sequences == 0:
            raise UserError(
                f"{self._idx} has {len(index)} bytes, which does not fit its "
                f"{sequences} sequences and {bounds} document bounds"
            )
        self.dtype = np.dtype(f"<{_CODES[code]}")
        starts = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences])
        self.lengths = np.frombuffer(index, "<i4", sequences, int(starts[0]))
        self.pointers = np.frombuffer(index, "<i8", sequences, int(starts[1]))
        self.documents = np.frombuffer(index, "<i8", bounds, int(starts[2]))
        data = _map(self._bin)
        expected = int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if len(data) != expected or expected % self.dtype.itemsize:
            raise UserError(
                f"{self._bin} has {len(data)} bytes where its index says {expected}: "
                "convert it again"
            )
        self.ids = data.view(self.dtype)

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[Any]:
        """Return the ids of a sequence as a view, without copying."""
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self.ids[start : start + int(self.lengths[index])]

    def check(self) -> None:
        """Check every length, pointer and document bound.

        Raises:
            UserError: one does not fit.
        """
        offset = 0
        for start in range(0, len(self), _SLICE):
            lengths = self.lengths[start : start + _SLICE].astype(np.int64)
            ends = np.cumsum(lengths) * self.dtype.itemsize + offset
            begins = np.concatenate(([offset], ends[:-1]))
            if lengths.min() < 0 or not np.array_equal(
                begins, self.pointers[start : start + _SLICE]
            ):
                raise UserError(f"{self._idx} is damaged: its offsets do not follow its lengths")
            offset = int(ends[-1])
        bounds = self.documents
        if bounds[0] != 0 or bounds[-1] != len(self) or np.any(bounds[1:] < bounds[:-1]):
            raise UserError(f"{self._idx} is damaged: its document bounds do not rise to the end")


def _map(path: Path) -> NDArray[np.uint8]:
    try:
        return np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise UserError(f"{path} cannot be read: {error}") from None
