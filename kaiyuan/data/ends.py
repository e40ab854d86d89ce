"""Where each document of a phase ends in the stream of the training order."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.files import atomic_write

_SLICE = 4_000_000


def build_ends(phase: ConvertedPhase, cache: Path) -> Path:
    """Write where each document ends in the stream of the training order, unless it is there.

    A file, because a phase has hundreds of millions of documents and every process of a machine
    needs the numbers; they share the memory of the file. Its name is the hash of the data, so
    that data that was converted again is never read with the ends of the old.

    Args:
        phase: the converted data.
        cache: folder, made where it is missing.

    Returns:
        A .npy file, int64 [documents].
    """
    path = ends_path(phase, cache)
    if not path.exists():
        header = {"descr": "<i8", "fortran_order": False, "shape": (phase.num_documents,)}
        with atomic_write(path) as stream:
            np.lib.format.write_array_header_1_0(stream, header)
            for part in document_ends(phase):
                part.tofile(stream)
    return path


def ends_path(phase: ConvertedPhase, cache: Path) -> Path:
    """Return where `build_ends` writes."""
    return cache / f"{phase.content_hash}.ends.npy"


def document_ends(phase: ConvertedPhase) -> Iterator[NDArray[np.int64]]:
    """Yield where each document ends in the stream of the training order, part by part."""
    lengths, order = phase.document_lengths(), phase.order()
    position = 0
    for begin in range(0, phase.num_documents, _SLICE):
        part = slice(begin, begin + _SLICE)
        taken = lengths[part] if order is None else lengths[order[part]]
        ends = position + np.cumsum(taken, dtype=np.int64)
        position = int(ends[-1])
        yield ends
