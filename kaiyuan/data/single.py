"""One file pair that holds a phase in physical training order, for a stock Megatron."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kaiyuan.data.indexed import write_indexed
from kaiyuan.data.phase import Shards

SINGLE = "single"
_SLICE_TOKENS = 4_000_000


def write_single(
    shards: Shards, ids: NDArray[Any] | None, dtype: np.dtype[Any], vocab_size: int, prefix: Path
) -> dict[str, Any]:
    """Write all documents in training order to ``prefix.bin`` and ``prefix.idx``.

    Args:
        shards: the documents.
        ids: document numbers in training order, None for their own order.
        dtype: type of the ids on the disk.
        vocab_size: ids are below it.
        prefix: path without suffix.

    Returns:
        ``{"bin": {"size", "sha256"}, "idx": ...}``.
    """
    lengths = shards.lengths()
    files: dict[str, Any] = {}
    with write_indexed(prefix, dtype, vocab_size, files) as writer:
        # Slices of about equal numbers of tokens keep the memory bounded.
        step = max(1, int(_SLICE_TOKENS * len(lengths) / lengths.sum(dtype=np.int64)))
        for start in range(0, len(lengths), step):
            stop = min(start + step, len(lengths))
            chosen = np.arange(start, stop) if ids is None else np.asarray(ids[start:stop])
            parts = [_run(shards, first, last) for first, last in _runs(shards, chosen)]
            writer.add(np.concatenate(parts), lengths[chosen])
    return files


def _runs(shards: Shards, chosen: NDArray[Any]) -> list[tuple[int, int]]:
    """Cut document numbers into runs of consecutive ones within a shard: (first, last)."""
    shard = np.searchsorted(shards.bounds, chosen, side="right")
    breaks = np.flatnonzero((np.diff(chosen) != 1) | (np.diff(shard) != 0))
    firsts = np.concatenate(([0], breaks + 1))
    lasts = np.concatenate((breaks, [len(chosen) - 1]))
    return list(zip(chosen[firsts].tolist(), chosen[lasts].tolist(), strict=True))


def _run(shards: Shards, first: int, last: int) -> NDArray[Any]:
    shard, place = shards.locate(first)
    reader = shards.reader(shard)
    end = place + last - first
    itemsize = reader.dtype.itemsize
    begin = int(reader.pointers[place]) // itemsize
    stop = int(reader.pointers[end]) // itemsize + int(reader.lengths[end])
    return reader.ids[begin:stop]
