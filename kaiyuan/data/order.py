"""The training order of a phase: an index over documents, and its hash.

Documents are numbered by where they stand in the input: by file, then by row. The order says in
which sequence training takes them. Both are the same for any number of workers.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

OrderKind = Literal["rank", "rank-desc", "file"]
# One record a document, hashed in training order.
RECORD = np.dtype([("file", "<i4"), ("row", "<i8"), ("tokens", "<i4")])
_SLICE = 1_000_000


@dataclass(frozen=True)
class Order:
    """The order of a phase.

    Attributes:
        ids: document numbers in training order, int32 (int64 from 2^31 documents on), shape
            [documents]; None where it is the documents' own order.
        duplicates: documents whose rank another document before them has too; they follow it
            in the order of file and row.
    """

    ids: NDArray[Any] | None
    duplicates: int


def order_by_rank(ranks: NDArray[Any], descending: bool = False) -> Order:
    """Order documents by rank; equal ranks stay in the order of file and row.

    Takes about 5 ns and 32 bytes of memory a document and 16-bit digit in which ranks differ.

    Args:
        ranks: int64 or float64 without NaN, shape [documents].
        descending: the highest rank first.
    """
    keys = _sortable(ranks)
    if descending:
        np.invert(keys, out=keys)
    if np.all(keys[1:] >= keys[:-1]):
        return Order(None, int(np.count_nonzero(keys[1:] == keys[:-1])))
    ids = _radix_argsort(keys)
    duplicates = 0
    for start in range(0, len(ids), _SLICE):
        part = keys[ids[start : start + _SLICE + 1]]
        duplicates += int(np.count_nonzero(part[1:] == part[:-1]))
    return Order(ids, duplicates)


def order_hash(records: NDArray[Any], ids: NDArray[Any] | None) -> str:
    """Return the SHA-256 over (input file, row, tokens) of every document in training order.

    Args:
        records: of type `RECORD`, in the documents' own order.
        ids: as in `Order`.
    """
    digest = hashlib.sha256()
    for start in range(0, len(records), _SLICE):
        part = slice(start, start + _SLICE)
        chosen = records[part] if ids is None else records[ids[part]]
        digest.update(np.ascontiguousarray(chosen).view(np.uint8).data)
    return digest.hexdigest()


def _sortable(ranks: NDArray[Any]) -> NDArray[np.uint64]:
    """Map ranks to unsigned integers that compare the same way."""
    sign = np.uint64(1 << 63)
    if ranks.dtype.kind != "f":
        return ranks.astype(np.int64).view(np.uint64) ^ sign
    # + 0.0 turns -0.0, which equals 0.0 but has other bits, into 0.0.
    keys = (ranks.astype(np.float64) + 0.0).view(np.uint64)
    for start in range(0, len(keys), _SLICE):
        part = keys[start : start + _SLICE]
        # By their bits negative IEEE 754 numbers sort backwards: flip all bits of these, and
        # only the sign of the others.
        part[:] = np.where(part & sign, ~part, part | sign)
    return keys


def _radix_argsort(keys: NDArray[np.uint64]) -> NDArray[Any]:
    """Stable argsort, 16 bits at a time from the lowest (numpy sorts uint16 by counting)."""
    index_dtype = np.int32 if len(keys) < 2**31 else np.int64
    varying = int(np.bitwise_or.reduce(keys ^ keys[0]))
    ids: NDArray[Any] | None = None
    for shift in range(0, 64, 16):
        if not (varying >> shift) & 0xFFFF:
            continue
        digit = (keys >> np.uint64(shift)).astype(np.uint16)
        if ids is None:
            ids = np.argsort(digit, kind="stable").astype(index_dtype)
        else:
            ids = ids[np.argsort(digit[ids], kind="stable")]
    assert ids is not None  # only called with keys that differ
    return ids
