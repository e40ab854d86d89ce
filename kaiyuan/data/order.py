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

    Beside the ranks it takes 24 bytes of memory a document.

    Args:
        ranks: int64 or float64 without NaN, shape [documents].
        descending: the highest rank first.
    """
    before, after = (ranks[1:], ranks[:-1]) if descending else (ranks[:-1], ranks[1:])
    ids = None if np.all(before <= after) else _radix_argsort(ranks, descending)
    duplicates = 0
    for start in range(0, len(ranks), _SLICE):
        part = slice(start, start + _SLICE + 1)
        in_order = ranks[part] if ids is None else ranks[ids[part]]
        duplicates += int(np.count_nonzero(in_order[1:] == in_order[:-1]))
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


def _radix_argsort(ranks: NDArray[Any], descending: bool) -> NDArray[Any]:
    """Stable argsort, 16 bits at a time from the lowest (numpy sorts uint16 by counting)."""
    index_dtype = np.int32 if len(ranks) < 2**31 else np.int64
    varying = 0
    for start in range(0, len(ranks), _SLICE):
        keys = _keys(ranks[start : start + _SLICE], descending)
        varying |= int(np.bitwise_or.reduce(keys ^ _keys(ranks[:1], descending)))
    ids: NDArray[Any] | None = None
    digit = np.empty(len(ranks), np.uint16)
    for shift in range(0, 64, 16):
        if not (varying >> shift) & 0xFFFF:
            continue
        for start in range(0, len(ranks), _SLICE):
            part = slice(start, start + _SLICE)
            digit[part] = (_keys(ranks[part], descending) >> np.uint64(shift)).astype(np.uint16)
        if ids is None:
            ids = np.argsort(digit, kind="stable").astype(index_dtype)
        else:
            ids = ids[np.argsort(digit[ids], kind="stable")]
    assert ids is not None  # only called with ranks that differ
    return ids


def _keys(ranks: NDArray[Any], descending: bool) -> NDArray[np.uint64]:
    """Map ranks to unsigned integers that compare the same way, or the other way round."""
    sign = np.uint64(1 << 63)
    if ranks.dtype.kind == "f":
        # + 0.0 turns -0.0, which equals 0.0 but has other bits, into 0.0.
        bits = (ranks.astype(np.float64) + 0.0).view(np.uint64)
        # By their bits negative IEEE 754 numbers sort backwards: flip all bits of these, and
        # only the sign of the others.
        keys = np.where(bits & sign, ~bits, bits | sign)
    else:
        keys = ranks.astype(np.int64).view(np.uint64) ^ sign
    return ~keys if descending else keys
