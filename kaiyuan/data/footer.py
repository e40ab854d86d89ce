"""Read parquet footers, damaged ones too.

pyarrow ends the whole process (C++ terminate) when it is asked about a column of some damaged
footers. Footers are therefore parsed by a process of their own: its end is a fault of that file
and of nothing else. It is fed by lines of base64 and answers with lines of JSON.
"""

import base64
import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq

from kaiyuan.data.sources import Source

TEXT = "text"
RANK = "rank"
_MAGIC = b"PAR1"
_READING_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError)


class Damaged(Exception):
    """The file is not readable parquet; the message says why in a few words."""


@dataclass
class Group:
    """One row group.

    Attributes:
        text_bytes: bytes of its texts before compression.
        text_nulls, rank_nulls: rows without; None if the writer did not tell.
        rank_low, rank_high: smallest and largest rank; None if the writer did not tell.
    """

    rows: int
    text_bytes: int = 0
    text_nulls: int | None = None
    rank_nulls: int | None = None
    rank_low: float | int | None = None
    rank_high: float | int | None = None


@dataclass
class Footer:
    """What a footer tells; ``has_text`` and ``has_rank`` ask for the right type as well."""

    rows: int
    columns: dict[str, str]
    codecs: list[str]
    writer: str
    has_text: bool
    has_rank: bool
    groups: list[Group]


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Turn the many errors of reading a damaged file into one: Damaged."""
    try:
        yield
    except httpx2.HTTPError as error:
        # Its message is not shown: it may hold a signed address.
        raise Damaged(f"cannot be read from the hub ({type(error).__name__})") from error
    except _READING_ERRORS as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise Damaged(f"cannot be read as parquet: {reason}") from error


def read_tail(source: Source) -> bytes:
    """Return a file's footer with its length and magic, the last bytes of the file."""
    if source.size < 12:
        raise Damaged(f"is no parquet file: it has only {source.size} bytes")
    with source.open() as stream:
        if stream.read(4) != _MAGIC:
            raise Damaged("is no parquet file: it does not begin with PAR1")
        stream.seek(source.size - 8)
        end = stream.read(8)
        length = int.from_bytes(end[:4], "little")
        if end[4:] != _MAGIC or length > source.size - 12:
            raise Damaged("is cut short or damaged: no parquet footer at its end")
        stream.seek(source.size - 8 - length)
        return bytes(stream.read(length + 8))


class FooterReader:
    """Parse footers in a process of their own.

    Args:
        text, rank: names of the two columns that matter.
    """

    def __init__(self, text: str = TEXT, rank: str = RANK) -> None:
        self._columns = [text, rank]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None

    def read(self, source: Source) -> Footer:
        """Return the footer of a file.

        Raises:
            Damaged: it has none that can be used.
        """
        with reading():
            tail = read_tail(source)
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *self._columns],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(base64.b64encode(tail) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it says no more, which is seen below
        line = self._process.stdout.readline()
        if not line:
            self._process.communicate()
            self._process = None
            raise Damaged("is damaged: its footer makes the parquet library crash")
        answer = json.loads(line)
        if "fault" in answer:
            raise Damaged(answer["fault"])
        return Footer(**{**answer, "groups": [Group(**group) for group in answer["groups"]]})


def parse(tail: bytes, text: str, rank: str) -> Footer:
    """Parse a footer; on some damaged ones the process ends."""
    with pq.ParquetFile(io.BytesIO(_MAGIC + tail)) as file:
        meta, schema = file.metadata, file.schema_arrow
    row_groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
    if sum(group.num_rows for group in row_groups) != meta.num_rows:
        raise ValueError("its footer contradicts itself about the number of rows")
    chunks = [[group.column(i) for i in range(group.num_columns)] for group in row_groups]
    has_text, has_rank = _has(schema, text, _is_text), _has(schema, rank, _is_number)
    groups = []
    for group, columns in zip(row_groups, chunks, strict=True):
        entry = Group(group.num_rows)
        groups.append(entry)
        for chunk in columns:
            stats = chunk.statistics
            nulls = stats.null_count if stats is not None and stats.has_null_count else None
            if chunk.path_in_schema == text and has_text:
                if chunk.num_values != group.num_rows:
                    raise ValueError("its footer contradicts itself about the number of rows")
                entry.text_bytes, entry.text_nulls = chunk.total_uncompressed_size, nulls
            elif chunk.path_in_schema == rank and has_rank:
                entry.rank_nulls = nulls
                if stats is not None and stats.has_min_max:
                    entry.rank_low, entry.rank_high = stats.min, stats.max
    return Footer(
        rows=meta.num_rows,
        columns={column.name: str(column.type) for column in schema},
        codecs=sorted({chunk.compression for columns in chunks for chunk in columns}),
        writer=meta.created_by or "",
        has_text=has_text,
        has_rank=has_rank,
        groups=groups,
    )


def _has(schema: pa.Schema, name: str, fits: Any) -> bool:
    return schema.names.count(name) == 1 and bool(fits(schema.field(name).type))


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _serve() -> None:
    for line in sys.stdin.buffer:
        try:
            with reading():
                answer = asdict(parse(base64.b64decode(line), *sys.argv[1:]))
        except Damaged as fault:
            answer = {"fault": str(fault)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
