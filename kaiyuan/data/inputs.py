"""The parquet files of a conversion: finding them, reading their footers, streaming their rows."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kaiyuan.data.footer import Damaged, FooterReader
from kaiyuan.data.sources import Source, local_files
from kaiyuan.errors import UserError

# A batch is the unit of decoding and encoding: big enough to hide the cost of a call, small
# enough that a worker's memory is bounded by its longest documents.
_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 4096


@dataclass(frozen=True)
class InputFile:
    """A parquet file and what its footer says.

    Attributes:
        path: where it is.
        name: its path below the folder that all inputs share, with ``/``.
        size: bytes.
        mtime_ns: time of its last change, to notice one between a killed run and the next.
        rows: of each row group.
        text_bytes: of each row group, uncompressed as the footer gives it.
        rank_type: the name of the rank column's type, None where there is no such column.
    """

    path: Path
    name: str
    size: int
    mtime_ns: int
    rows: tuple[int, ...]
    text_bytes: tuple[int, ...]
    rank_type: str | None


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of a file that hold documents.

    Attributes:
        texts: non-empty texts.
        rows: row number in the file of each, int64.
        ranks: rank of each, int64 or float64; None unless asked for.
        text_bytes: UTF-8 bytes of the texts.
        num_null, num_empty: rows left out between them.
    """

    texts: list[str]
    rows: NDArray[np.int64]
    ranks: NDArray[Any] | None
    text_bytes: int
    num_null: int
    num_empty: int


def find_inputs(
    inputs: Sequence[str | Path], text_column: str = "text", rank_column: str = "rank"
) -> list[InputFile]:
    """Return the files of some files, folders and globs, with their footers read.

    Several inputs keep the order in which they were given; see `local_files` for what each means.

    Raises:
        UserError: nothing there, a file given twice, damaged, or without a column of text.
    """
    paths = [_absolute(path) for item in inputs for path in local_files(str(item))]
    seen: set[Path] = set()
    for path in paths:
        file = path.resolve()
        if file in seen:
            raise UserError(f"{file} is among the inputs twice")
        seen.add(file)
    shared = Path(os.path.commonpath([path.parent for path in paths]))
    with FooterReader(text_column, rank_column) as reader:
        return [
            _read_footer(
                reader, path, path.relative_to(shared).as_posix(), text_column, rank_column
            )
            for path in paths
        ]


def read_rows(
    file: InputFile, groups: range, text_column: str, rank_column: str | None
) -> Iterator[Batch]:
    """Stream the documents of some row groups.

    Args:
        file: from `find_inputs`.
        groups: consecutive row groups.
        text_column: name of the text.
        rank_column: name of the rank, or None to leave it unread.

    Raises:
        UserError: the file is damaged, or a document has no rank.
    """
    row = sum(file.rows[: groups.start])
    expected = row + sum(file.rows[groups.start : groups.stop])
    columns = [text_column] if rank_column is None else [text_column, rank_column]
    try:
        # pre_buffer would hold the whole compressed row groups; a small buffer streams them.
        with pq.ParquetFile(
            file.path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        ) as parquet:
            for batch in parquet.iter_batches(
                batch_size=_batch_rows(file, groups),
                row_groups=list(groups),
                columns=columns,
                use_threads=False,
            ):
                yield _documents_of(file, batch, row, text_column, rank_column)
                row += batch.num_rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file.path} is damaged near row {row}: {_first_line(error)}") from error
    if row != expected:
        raise UserError(f"{file.path} is damaged: it has {row} rows where {expected} are announced")


def texts_of(inputs: Sequence[str | Path]) -> Iterator[str]:
    """Return the texts of all documents, file by file, row by row.

    Raises:
        UserError: see `find_inputs`, at once, and `read_rows`, on the way.
    """
    files = find_inputs(inputs)
    batches = (read_rows(file, range(len(file.rows)), "text", None) for file in files)
    return (text for each in batches for batch in each for text in batch.texts)


def _absolute(path: Path) -> Path:
    """Return a path that does not depend on the current folder; links in it stay."""
    # What ".." means depends on where the links before it lead.
    return path.parent.resolve() / path.name if ".." in path.parts else path.absolute()


def _read_footer(
    reader: FooterReader, path: Path, name: str, text_column: str, rank_column: str
) -> InputFile:
    stat = path.stat()
    try:
        footer = reader.read(Source(str(path), stat.st_size, partial(path.open, "rb")))
    except Damaged as damage:
        raise UserError(f"{path} is not a whole parquet file: it {damage}") from None
    if text_column not in footer.columns:
        raise UserError(
            f"{path} has no column {text_column!r}, only {', '.join(footer.columns)}: "
            "name the one to convert with --text-column"
        )
    if not footer.has_text:
        kind = footer.columns[text_column]
        raise UserError(f"{path}: column {text_column!r} is {kind}, where text is needed")
    return InputFile(
        path=path,
        name=name,
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        rows=tuple(group.rows for group in footer.groups),
        text_bytes=tuple(group.text_bytes for group in footer.groups),
        rank_type=footer.columns.get(rank_column),
    )


def _batch_rows(file: InputFile, groups: range) -> int:
    rows = sum(file.rows[groups.start : groups.stop])
    size = sum(file.text_bytes[groups.start : groups.stop])
    return max(1, min(_BATCH_ROWS, rows * _BATCH_BYTES // max(size, 1)))


def _documents_of(
    file: InputFile, batch: pa.RecordBatch, row: int, text_column: str, rank_column: str | None
) -> Batch:
    column = batch.column(batch.schema.get_field_index(text_column))
    if column.type != pa.string():
        column = column.cast(pa.large_string())
    sizes = pc.binary_length(column)
    kept = np.asarray(sizes.fill_null(0)) > 0
    rows = np.flatnonzero(kept) + row
    ranks = None
    if rank_column is not None:
        rank = batch.column(batch.schema.get_field_index(rank_column))
        ranks = _ranks_of(file, rank, kept, rows)
    return Batch(
        texts=[text for text in column.to_pylist() if text],
        rows=rows,
        ranks=ranks,
        text_bytes=pc.sum(sizes).as_py() or 0,
        num_null=column.null_count,
        num_empty=len(column) - len(rows) - column.null_count,
    )


def _ranks_of(
    file: InputFile, column: pa.Array, kept: NDArray[np.bool_], rows: NDArray[np.int64]
) -> NDArray[Any]:
    known = np.asarray(column.is_valid())[kept]
    floating = pa.types.is_floating(column.type)
    kind = pa.float64() if floating else pa.int64()
    try:
        ranks = np.asarray(column.cast(kind).fill_null(0))[kept]
    except pa.ArrowInvalid as error:  # a uint64 above the int64
        raise UserError(f"{file.path}: ranks out of range: {_first_line(error)}") from None
    bad = ~known | (np.isnan(ranks) if floating else False)
    if np.any(bad):
        row = int(rows[int(np.argmax(bad))])
        raise UserError(
            f"{file.path}: row {row} has no rank (null or NaN), so its place is unknown: "
            "mend the file or use --order file"
        )
    return ranks


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
