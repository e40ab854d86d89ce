"""The units of work of a conversion: each turns a range of row groups into one shard."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kaiyuan.data.indexed import IndexedWriter, id_dtype, write_indexed
from kaiyuan.data.inputs import Batch, InputFile, read_rows
from kaiyuan.data.tokenizer import Encoder, EncoderName, SpecialText, load_encoder
from kaiyuan.errors import UserError
from kaiyuan.files import hashed_write, sha256_of, write_json

# Units cut the text into 64 parts or more, so that every worker has work to the end, but none
# below 16 MiB, which would only make small files, and none above 1 GiB, which would be lost too
# much when a run is killed. The cut depends on the input alone: so do the shards.
_UNITS = 64
_SMALLEST, _BIGGEST = 16 << 20, 1 << 30
SHARDS = "shards"


@dataclass(frozen=True)
class Unit:
    """Consecutive row groups of one file, which become one shard.

    Attributes:
        number: place in the conversion, also the shard's name.
        file: index of the input file.
        start, stop: row groups.
    """

    number: int
    file: int
    start: int
    stop: int


@dataclass(frozen=True)
class Job:
    """What all units of a conversion share.

    Attributes:
        id: hash of everything that decides the shards' bytes; stands in each unit's record.
        folder: the output.
        tokenizer, json_sha256: tokenizer folder and the hash of its tokenizer.json.
        rank_column: None where the order does not need it.
    """

    id: str
    folder: Path
    tokenizer: Path
    json_sha256: str
    vocab_size: int
    eod: int
    encoder: EncoderName
    special_text: SpecialText
    text_column: str
    rank_column: str | None


@dataclass
class Counts:
    """Rows = null + empty + documents, always.

    Attributes:
        tokens: end-of-document tokens included.
        text_bytes: UTF-8 bytes of the documents.
        eod_in_text: end-of-document tokens that stood in the texts themselves.
    """

    rows: int = 0
    null: int = 0
    empty: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    eod_in_text: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{k: v + getattr(other, k) for k, v in asdict(self).items()})


def cut_units(files: list[InputFile]) -> list[Unit]:
    """Cut the input into units, in the order of files and rows."""
    total = sum(sum(file.text_bytes) for file in files)
    target = min(max(total // _UNITS, _SMALLEST), _BIGGEST)
    units: list[Unit] = []
    for index, file in enumerate(files):
        start, size = 0, 0
        for group, group_bytes in enumerate(file.text_bytes):
            # Stop before a row group that would carry the unit further past the target than
            # the unit now falls short of it.
            if group > start and size + group_bytes / 2 > target:
                units.append(Unit(len(units), index, start, group))
                start, size = group, 0
            size += group_bytes
        if file.rows:
            units.append(Unit(len(units), index, start, len(file.rows)))
    return units


def shard_prefix(folder: Path, number: int) -> Path:
    """Return the path of a shard without its suffix."""
    return folder / SHARDS / f"{number:05d}"


def run_unit(job: Job, unit: Unit, file: InputFile) -> dict[str, Any]:
    """Convert a unit and write its record last.

    The shard is ``.bin`` and ``.idx`` (Megatron's), ``.rows.npy`` (row number in the input file of
    each document) and, where the order needs it, ``.ranks.npy``. A unit without documents has
    only its record. The first unit of a file also hashes the file.

    Returns:
        The record: ``job``, ``unit``, ``input_sha256`` (or None), ``counts``, ``files``.
    """
    prefix = shard_prefix(job.folder, unit.number)
    encoder = load_encoder(job.tokenizer, job.json_sha256, job.encoder, job.special_text)
    groups = range(unit.start, unit.stop)
    counts = Counts()
    batches = _count(read_rows(file, groups, job.text_column, job.rank_column), counts)
    files: dict[str, Any] = {}
    # Megatron cannot open an empty .bin: begin one only when there is a document.
    first = next((batch for batch in batches if batch.texts), None)
    if first is not None:
        row_dtype = np.int32 if sum(file.rows) < 2**31 else np.int64
        shard = _Shard(job, encoder, counts, np.dtype(row_dtype))
        with write_indexed(prefix, id_dtype(job.vocab_size), job.vocab_size, files) as writer:
            shard.add(writer, first)
            for batch in batches:
                shard.add(writer, batch)
        shard.write_columns(prefix, files)
    record = {
        "job": job.id,
        "unit": asdict(unit),
        "input_sha256": sha256_of(file.path) if unit.start == 0 else None,
        "counts": asdict(counts),
        "files": files,
    }
    write_json(_record_path(job, unit), record)
    return record


def read_record(job: Job, unit: Unit) -> dict[str, Any] | None:
    """Return the record of a finished unit of this job, None if it is still to be done."""
    prefix = shard_prefix(job.folder, unit.number)
    try:
        record = json.loads(_record_path(job, unit).read_text(encoding="utf-8"))
        sizes = {name: _size(prefix, name) for name in record["files"]}
        wanted = {name: entry["size"] for name, entry in record["files"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there or not whole: do the unit again
    same = record.get("job") == job.id and record.get("unit") == asdict(unit) and sizes == wanted
    return record if same else None


def forget_unit(job: Job, unit: Unit) -> None:
    """Have a unit done again, where it is done."""
    _record_path(job, unit).unlink(missing_ok=True)


def _record_path(job: Job, unit: Unit) -> Path:
    return job.folder / SHARDS / f"{unit.number:05d}.json"


def _size(prefix: Path, name: str) -> int:
    return Path(f"{prefix}.{name}").stat().st_size


def _count(batches: Iterator[Batch], counts: Counts) -> Iterator[Batch]:
    for batch in batches:
        counts.rows += len(batch.texts) + batch.num_null + batch.num_empty
        counts.null += batch.num_null
        counts.empty += batch.num_empty
        yield batch


class _Shard:
    """Encodes batches, appends the end-of-document token and keeps each document's origin."""

    def __init__(
        self, job: Job, encoder: Encoder, counts: Counts, row_dtype: np.dtype[Any]
    ) -> None:
        self._job, self._encoder, self._counts = job, encoder, counts
        self._row_dtype = row_dtype
        self._rows: list[NDArray[Any]] = []
        self._ranks: list[NDArray[Any]] = []

    def add(self, writer: IndexedWriter, batch: Batch) -> None:
        if not batch.texts:
            return
        ids, lengths = self._encoder.encode(batch.texts)
        writer.add(*append_eod(ids, lengths, self._job.eod))
        self._rows.append(batch.rows.astype(self._row_dtype))
        if batch.ranks is not None:
            self._ranks.append(batch.ranks)
        self._counts.documents += len(batch.texts)
        self._counts.tokens += len(ids) + len(lengths)
        self._counts.text_bytes += batch.text_bytes
        self._counts.eod_in_text += int(np.count_nonzero(ids == self._job.eod))

    def write_columns(self, prefix: Path, files: dict[str, Any]) -> None:
        columns = {"rows.npy": np.concatenate(self._rows)}
        if self._ranks:
            columns["ranks.npy"] = np.concatenate(self._ranks)
        for name, column in columns.items():
            with hashed_write(prefix.with_name(f"{prefix.name}.{name}")) as stream:
                np.lib.format.write_array(stream, column, allow_pickle=False)
            files[name] = stream.entry()


def append_eod(
    ids: NDArray[Any], lengths: NDArray[np.int64], eod: int
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Put the end-of-document id behind each document.

    Args:
        ids: the documents' ids one after another, shape [total].
        lengths: ids of each, shape [documents].
        eod: the id.

    Returns:
        The same with ``total + documents`` ids and lengths greater by one.
    """
    longer = lengths + 1
    out = np.empty(len(ids) + len(lengths), ids.dtype)
    is_text = np.ones(len(out), bool)
    is_text[np.cumsum(longer) - 1] = False
    out[is_text] = ids
    out[~is_text] = eod
    return out, longer


def check_unchanged(file: InputFile) -> None:
    """Check that an input still has the size and time that it had when the run began.

    Raises:
        UserError: it was changed or removed meanwhile.
    """
    try:
        stat = file.path.stat()
    except OSError:
        raise UserError(f"{file.path} was removed while it was converted") from None
    if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
        raise UserError(f"{file.path} was changed while it was converted: start again")
