"""Parquet to Megatron's file pairs: plan, run the units, put the order beside them, seal."""

import contextlib
import fcntl
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kaiyuan import __version__
from kaiyuan.data.executors import ExecutorName, UnitExecutor, unit_executor
from kaiyuan.data.indexed import id_dtype
from kaiyuan.data.inputs import InputFile, find_inputs, read_rows
from kaiyuan.data.order import Order, OrderKind, order_by_rank, order_hash
from kaiyuan.data.phase import KIND, ORDER_FILE, ConvertedPhase, Shards
from kaiyuan.data.single import SINGLE, write_single
from kaiyuan.data.tokenizer import (
    ENDOFTEXT,
    EncoderName,
    SpecialText,
    TokenizerInfo,
    choose_encoder,
    load_tokenizer,
)
from kaiyuan.data.units import (
    SHARDS,
    Counts,
    Job,
    Unit,
    check_unchanged,
    cut_units,
    forget_unit,
    read_record,
    shard_prefix,
)
from kaiyuan.errors import UserError
from kaiyuan.files import (
    MANIFEST,
    hashed_write,
    make_folder,
    sha256_of,
    sha256_of_json,
    write_json,
    write_manifest,
)
from kaiyuan.progress import ConversionProgress, human_bytes

PLAN, LOCK = "plan.json", ".lock"
FORMAT = 1  # raise it when the bytes of a shard would change for the same input
_SAMPLE_PARTS, _SAMPLE_CHARS = 8, 100_000


@dataclass(frozen=True)
class Conversion:
    """A checked plan: what will be read, and how.

    Attributes:
        files, units: the input and its cut into shards.
        job: what the units share.
        order: kind of order.
        eod_token: the token of id ``job.eod``.
        tokenizer: the tokenizer.
        encoder_note: why the encoder is not the wanted one, or empty.
        tokens_per_byte: of a sample.
        identity: everything that decides the result; a run goes on only with the same.
    """

    files: list[InputFile]
    units: list[Unit]
    job: Job
    order: OrderKind
    eod_token: str
    tokenizer: TokenizerInfo
    encoder_note: str
    tokens_per_byte: float
    identity: dict[str, Any]

    def bytes_of(self, unit: Unit) -> int:
        """Return the text of a unit in bytes, as the footer gives it."""
        return sum(self.files[unit.file].text_bytes[unit.start : unit.stop])

    def summary(self, single: bool = False) -> dict[str, Any]:
        """Return what the conversion will read, write and need on the disk (estimates)."""
        text = sum(sum(file.text_bytes) for file in self.files)
        rows = sum(sum(file.rows) for file in self.files)
        itemsize = id_dtype(self.job.vocab_size).itemsize
        tokens = int(text * self.tokens_per_byte) + rows
        # A document: 12 bytes of index and 8 of its bound, 4 of row number, 8 of rank, 4 of order.
        pair = tokens * itemsize + 20 * rows
        return {
            "files": len(self.files),
            "input_bytes": sum(file.size for file in self.files),
            "rows": rows,
            "text_bytes": text,
            "order": self.order,
            "encoder": self.job.encoder,
            "encoder_note": self.encoder_note,
            "eod": {"id": self.job.eod, "token": self.eod_token},
            "dtype": id_dtype(self.job.vocab_size).name,
            "shards": len(self.units),
            "tokens": tokens,
            "disk_bytes": pair * (2 if single else 1) + 16 * rows,
        }


def plan_conversion(
    inputs: Sequence[str | Path],
    output: Path | str,
    tokenizer: Path | str,
    *,
    order: OrderKind | None = None,
    eod: str = ENDOFTEXT,
    encoder: EncoderName = "fast",
    special_text: SpecialText = "parse",
    text_column: str = "text",
    rank_column: str = "rank",
    executor: UnitExecutor | None = None,
) -> Conversion:
    """Check everything that can be checked before the first byte is written.

    Args:
        inputs: parquet files, folders and globs.
        output: the folder of the phase.
        tokenizer: folder with the four files.
        order: "rank" (lowest first), "rank-desc" or "file"; None is "file", and refused where
            there are ranks.
        eod: the token that ends each document.
        encoder: "fast" (fastokens where it gives the same ids) or "hf".
        special_text: see `SpecialText`.
        text_column: name of the text.
        rank_column: name of the rank.
        executor: gets ready as soon as it is known how much there is to do.

    Raises:
        UserError: anything wrong with the input, the tokenizer or the options.
    """
    files = find_inputs(inputs, text_column, rank_column)
    order = _check_order(files, order, rank_column)
    # Where all is done, only the plan is checked.
    if executor is not None and not (Path(output) / MANIFEST).exists():
        text_bytes = sum(sum(file.text_bytes) for file in files)
        executor.start(Path(tokenizer), encoder, special_text, text_bytes)
    info = load_tokenizer(Path(tokenizer))
    eod_id = info.end_id(eod)
    units = cut_units(files)
    sample = _sample(files, units, text_column)
    choice = choose_encoder(
        info, encoder, special_text, sample, executor.pool if executor else None
    )
    rank = None if order == "file" else rank_column
    identity = {
        "format": FORMAT,
        "input": [[file.name, file.size, list(file.rows)] for file in files],
        "tokenizer": info.hash,
        "eod": eod_id,
        "encoder": choice.name,
        "special_text": special_text,
        "text_column": text_column,
        "rank_column": rank,
        "order": order,
    }
    job = Job(
        id=sha256_of_json(identity),
        folder=Path(output).absolute(),
        tokenizer=info.folder.absolute(),
        json_sha256=info.json_sha256,
        vocab_size=info.vocab_size,
        eod=eod_id,
        encoder=choice.name,
        special_text=special_text,
        text_column=text_column,
        rank_column=rank,
    )
    sample_bytes = sum(len(text.encode()) for text in sample)
    return Conversion(
        files=files,
        units=units,
        job=job,
        order=order,
        eod_token=eod,
        tokenizer=info,
        encoder_note=choice.note,
        tokens_per_byte=choice.sample_tokens / sample_bytes,
        identity=identity,
    )


def convert(
    inputs: Sequence[str | Path],
    output: Path | str,
    tokenizer: Path | str,
    *,
    workers: int | None = None,
    executor: ExecutorName = "local",
    single: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Convert parquet files to a phase; go on where a killed run of the same conversion was.

    Args:
        inputs, output, tokenizer: see `plan_conversion`.
        workers: units at a time; None for one a core (Ray: one a core of the cluster).
        executor: "local" or "ray".
        single: also write ``single.bin/.idx``, all documents in training order.
        **options: see `plan_conversion`.

    Returns:
        The manifest; its ``counts`` have rows, null, empty, documents, tokens, text_bytes.

    Raises:
        UserError: see `plan_conversion`; also too little disk, or an output of something else.
    """
    with unit_executor(executor, workers) as units:
        plan = plan_conversion(inputs, output, tokenizer, executor=units, **options)
        return _run_conversion(plan, units, single)


def _run_conversion(plan: Conversion, executor: UnitExecutor, single: bool) -> dict[str, Any]:
    if plan.encoder_note:
        print(f"convert: using the slower encoder: {plan.encoder_note}", file=sys.stderr)
    folder = plan.job.folder
    _check_folder(folder)
    _check_disk(plan, single)
    make_folder(folder)
    with _locked(folder):
        finished = _begin(plan)
        if finished is not None and (finished["single"] is not None or not single):
            return finished
        records = _run_missing(plan, executor)
        for file in plan.files:
            check_unchanged(file)
        return _finish(plan, records, single)


def _check_order(files: list[InputFile], order: OrderKind | None, rank_column: str) -> OrderKind:
    with_rank = [file for file in files if file.rank_type is not None]
    if order is None:
        if with_rank:
            raise UserError(
                f"{with_rank[0].name} has a column {rank_column!r}: say --order rank, "
                "--order rank-desc or --order file"
            )
        return "file"
    if order == "file":
        return "file"
    for file in files:
        if file.rank_type is None:
            raise UserError(f"{file.path} has no column {rank_column!r} to order by")
        if not file.rank_type.startswith(("int", "uint", "float", "double", "halffloat")):
            raise UserError(
                f"{file.path}: column {rank_column!r} is {file.rank_type}, where a number is needed"
            )
    return order


def _sample(files: list[InputFile], units: list[Unit], text_column: str) -> list[str]:
    """Take the beginnings of documents from all over the input."""
    texts: list[str] = []
    for unit in units[:: max(1, len(units) // _SAMPLE_PARTS)]:
        left = _SAMPLE_CHARS
        for batch in read_rows(files[unit.file], range(unit.start, unit.stop), text_column, None):
            for text in batch.texts:
                texts.append(text[:left])
                left -= len(texts[-1])
                if left <= 0:
                    break
            if left <= 0:
                break
    if not texts:
        raise UserError("the input has no documents: every row is null or empty")
    return texts


def _check_folder(folder: Path) -> None:
    """Refuse what is not ours before a file is made in it.

    The lock and the plan come first: with them alone a run was killed, or another is beginning.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    # One look: the plan may come between two.
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    others = [name for name in names if name != LOCK and not name.startswith(f".{PLAN}.")]
    if others and PLAN not in names:
        raise UserError(f"{folder} holds other things: give a new or empty folder")


def _check_disk(plan: Conversion, single: bool) -> None:
    needed = plan.summary(single)["disk_bytes"]
    folder = plan.job.folder
    if (folder / SHARDS).is_dir():
        needed -= sum(path.stat().st_size for path in (folder / SHARDS).iterdir())
    while not folder.exists():
        folder = folder.parent
    make_folder(folder)  # what cannot be written to may have no size
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{plan.job.folder} needs about {human_bytes(needed)}, but the disk has "
            f"{human_bytes(free)} free"
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second run out; the lock goes with the process, however it ends."""
    with (folder / LOCK).open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another conversion is writing to {folder}") from None
        yield


def _begin(plan: Conversion) -> dict[str, Any] | None:
    """Write the plan, or check that the folder's is the same.

    Returns:
        The manifest if the folder is finished.
    """
    folder = plan.job.folder
    path = folder / PLAN
    times = {file.name: file.mtime_ns for file in plan.files}
    if path.exists():
        _check_same(plan, path)
    for place in (folder, folder / SHARDS):  # what a killed run was writing
        for leftover in place.glob(".*.*.*"):
            leftover.unlink()
    if (folder / MANIFEST).exists():
        return ConvertedPhase.open(folder).manifest
    # Anew each time: fresh copies have other times.
    write_json(path, {"identity": plan.identity, "times": times})
    (folder / SHARDS).mkdir(exist_ok=True)
    return None


def _check_same(plan: Conversion, path: Path) -> None:
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        identity, times = written["identity"], written["times"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged: start again in a new folder") from None
    wanted = json.loads(json.dumps(plan.identity))
    other = sorted(key for key in wanted if identity.get(key) != wanted[key])
    if other:
        raise UserError(
            f"{path.parent} was begun with another {', '.join(other)}: give the same to go on, "
            "or a new folder"
        )
    for file in plan.files:
        if times[file.name] != file.mtime_ns:
            _check_same_content(plan, file)


def _check_same_content(plan: Conversion, file: InputFile) -> None:
    """A file with another time may be a fresh copy: compare it with the hash of the first run.

    Where the unit that has the hash is not done, those of the file that are done are done again.
    """
    units = [unit for unit in plan.units if plan.files[unit.file] is file]
    records = [record for unit in units if (record := read_record(plan.job, unit)) is not None]
    known = {r["input_sha256"] for r in records} - {None}
    if not known:
        for unit in units:
            forget_unit(plan.job, unit)
    elif known != {sha256_of(file.path)}:
        raise UserError(
            f"{file.path} was changed since this conversion began: bring it back, or start again "
            "in a new folder"
        )


def _run_missing(plan: Conversion, executor: UnitExecutor) -> list[dict[str, Any]]:
    """Run the units that have no record yet; return all records in order."""
    records = {unit.number: read_record(plan.job, unit) for unit in plan.units}
    missing = [unit for unit in plan.units if records[unit.number] is None]
    sizes = {unit.number: plan.bytes_of(unit) for unit in plan.units}
    total = sum(sizes.values())
    left = sum(sizes[unit.number] for unit in missing)
    with ConversionProgress(total, total - left) as progress:
        for record in executor.run(plan.job, missing, plan.files):
            number = record["unit"]["number"]
            records[number] = record
            progress.add(sizes[number], record["counts"])
    return [found for unit in plan.units if (found := records[unit.number]) is not None]


def _finish(plan: Conversion, records: list[dict[str, Any]], single: bool) -> dict[str, Any]:
    """Write what needs all units: the order, the single pair, the manifest."""
    folder, job = plan.job.folder, plan.job
    counts = sum((Counts(**record["counts"]) for record in records), Counts())
    full = [record for record in records if record["files"]]
    prefixes = [shard_prefix(folder, record["unit"]["number"]) for record in full]
    shards = Shards(prefixes, [record["counts"]["documents"] for record in full])
    order = _order_of(plan, prefixes)
    order_file = None
    if order.ids is not None:
        with hashed_write(folder / ORDER_FILE) as stream:
            np.lib.format.write_array(stream, order.ids, allow_pickle=False)
        order_file = stream.entry()
    dtype = id_dtype(job.vocab_size)
    pair = None
    if single:
        files = write_single(shards, order.ids, dtype, job.vocab_size, folder / SINGLE)
        pair = {"prefix": SINGLE, "files": files}
    body = {
        "code_version": __version__,
        "counts": asdict(counts),
        "dtype": dtype.name,
        "encoder": job.encoder,
        "eod": {"id": job.eod, "token": plan.eod_token},
        "special_text": job.special_text,
        "text_column": job.text_column,
        "tokenizer": {"hash": plan.tokenizer.hash, "vocab_size": job.vocab_size},
        "order": {
            "kind": plan.order,
            "column": job.rank_column,
            "hash": order_hash(shards.records([r["unit"]["file"] for r in full]), order.ids),
            "duplicates": order.duplicates,
            "file": order_file,
        },
        "inputs": _inputs_of(plan, records),
        "shards": [_shard_entry(folder, record) for record in full],
        "single": pair,
    }
    return write_manifest(folder, KIND, body)


def _order_of(plan: Conversion, prefixes: list[Path]) -> Order:
    if plan.order == "file":
        return Order(None, 0)
    return order_by_rank(_ranks_of(prefixes), descending=plan.order == "rank-desc")


def _ranks_of(prefixes: list[Path]) -> NDArray[Any]:
    parts = [np.load(f"{prefix}.ranks.npy", allow_pickle=False) for prefix in prefixes]
    kinds = {part.dtype.kind for part in parts}
    if len(kinds) > 1 and any(_beyond_doubles(part) for part in parts):
        raise UserError(
            "some files have whole ranks above 2^53 and others fractions: they cannot be compared"
        )
    return np.concatenate(parts)


def _beyond_doubles(ranks: NDArray[Any]) -> bool:
    return ranks.dtype.kind == "i" and max(int(ranks.max()), -int(ranks.min())) > 2**53


def _inputs_of(plan: Conversion, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    counts = [Counts() for _ in plan.files]
    hashes: dict[int, str] = {}
    for record in records:
        index = record["unit"]["file"]
        counts[index] += Counts(**record["counts"])
        if record["input_sha256"] is not None:
            hashes[index] = record["input_sha256"]
    return [
        {
            "name": file.name,
            "size": file.size,
            "sha256": hashes.get(index) or sha256_of(file.path),  # no unit: a file without rows
            "counts": asdict(counts[index]),
        }
        for index, file in enumerate(plan.files)
    ]


def _shard_entry(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    unit = record["unit"]
    return {
        "prefix": shard_prefix(folder, unit["number"]).relative_to(folder).as_posix(),
        "input": unit["file"],
        "row_groups": [unit["start"], unit["stop"]],
        "documents": record["counts"]["documents"],
        "tokens": record["counts"]["tokens"],
        "files": record["files"],
    }
