"""Look into parquet files: what is in them, what is wrong with them, what convert will do.

Counts come from the footers, the rank column is read alone, texts are judged by a sample. A file
that cannot be read is a fault of that file; the others are reported all the same.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from kaiyuan.data.footer import RANK, TEXT, Damaged, Footer, FooterReader, reading
from kaiyuan.data.inspect_rank import RankReader, RankReport, fits_in_memory, ranks_from_footers
from kaiyuan.data.inspect_text import TextReport, TextSampler, choose_places, sampled_rows
from kaiyuan.data.sources import Source, find_sources
from kaiyuan.errors import UserError
from kaiyuan.progress import counted, human_bytes

_SHOWN = 5  # texts
_STOPS = "convert stops"
_PART = re.compile(r"part-(\d{4,6})\b")


@dataclass
class FileReport:
    """One file, by its footer.

    Attributes:
        name: path or hf:// address.
        size: bytes.
        fault: why it cannot be read, or None.
        text_bytes: bytes of the text column before compression; None without one.
        text_nulls: null texts; None if the footer does not tell.
    """

    name: str
    size: int
    fault: str | None = None
    rows: int = 0
    row_groups: int = 0
    codecs: list[str] = field(default_factory=list)
    columns: dict[str, str] = field(default_factory=dict)
    text_bytes: int | None = None
    text_nulls: int | None = None
    writer: str = ""


@dataclass
class Report:
    """All that was found; ``schemas`` maps the columns to the files that have them."""

    files: list[FileReport]
    schemas: list[dict[str, Any]]
    text: TextReport | None
    rank: RankReport | None
    notices: list[str]
    verdict: list[str]

    @property
    def rows(self) -> int:
        """Rows of all readable files."""
        return sum(file.rows for file in self.files)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def faults(self) -> list[FileReport]:
        """The files that cannot be read."""
        return [file for file in self.files if file.fault]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values; an infinite rank becomes None."""
        report = {"rows": self.rows, "size": self.size, **asdict(self)}
        if self.rank is not None:
            ends = (self.rank.low, self.rank.high)
            low, high = (x if x is not None and math.isfinite(x) else None for x in ends)
            report["rank"] |= {"low": low, "high": high, "contiguous": self.rank.contiguous}
        return report


def inspect(paths: list[str], tokenizer_folder: Path | None = None, sample: int = 2000) -> Report:
    """Inspect parquet files.

    Args:
        paths: files, folders, globs, or hf:// addresses.
        tokenizer_folder: holds tokenizer.json; None leaves tokens uncounted.
        sample: about how many rows of text to look at.

    Raises:
        UserError: a path means no file, no file can be read, or there is no such tokenizer.
    """
    tokenizer = _read_tokenizer(tokenizer_folder) if tokenizer_folder else None
    sources = find_sources(paths)
    files, readable = [], []
    with FooterReader() as reader:
        for source in sources:
            entry = FileReport(source.name, source.size)
            files.append(entry)
            with _fault_of(entry):
                footer = reader.read(source)
                _describe(entry, footer)
                readable.append((source, entry, footer))
    if not readable:
        more = f" (nor can {len(files) - 1} more)" if len(files) > 1 else ""
        raise UserError(f"{files[0].name} {files[0].fault}{more}")
    text = _inspect_text(readable, TextSampler(tokenizer, _SHOWN), sample)
    rank = _inspect_rank(readable)
    schemas = _group_schemas(files)
    report = Report(files, schemas, text, rank, _notices(files, schemas), [])
    report.verdict = _verdict(report)
    return report


Readable = list[tuple[Source, FileReport, Footer]]


def _read_tokenizer(folder: Path) -> Any:
    """Load ``folder/tokenizer.json``."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json" if folder.is_dir() else folder
    if not path.is_file():
        raise UserError(f"{folder} holds no tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer: {error}") from error


@contextmanager
def _fault_of(report: FileReport) -> Iterator[None]:
    """Note damage as a fault of the file."""
    try:
        yield
    except Damaged as damage:
        report.fault = str(damage)


@contextmanager
def _opened(source: Source) -> Iterator[pq.ParquetFile]:
    """Open a file whose footer was found good; what is damaged further in raises Damaged."""
    # Without pre-buffering, reading streams page by page instead of column by column.
    with (
        reading(),
        source.open() as stream,
        pq.ParquetFile(
            stream, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        ) as file,
    ):
        yield file


def _describe(report: FileReport, footer: Footer) -> None:
    report.rows, report.row_groups = footer.rows, len(footer.groups)
    report.codecs, report.columns, report.writer = footer.codecs, footer.columns, footer.writer
    if footer.has_text:
        report.text_bytes = sum(group.text_bytes for group in footer.groups)
        nulls = [group.text_nulls for group in footer.groups]
        report.text_nulls = None if None in nulls else sum(count or 0 for count in nulls)


def _inspect_text(readable: Readable, sampler: TextSampler, sample: int) -> TextReport | None:
    chosen = [entry for entry in readable if entry[2].has_text]
    by_file = defaultdict(list)
    for place in choose_places([footer for _, _, footer in chosen], sample):
        by_file[place.file].append(place)
    for number, places in by_file.items():
        source, report, footer = chosen[number]
        with _fault_of(report), _opened(source) as file:
            for place in places:
                for text, rank in sampled_rows(file, place, footer.has_rank):
                    sampler.add(text, rank, source.name)
    return sampler.report(sampler.rows == sum(f.rows for _, f, _ in chosen)) if chosen else None


def _inspect_rank(readable: Readable) -> RankReport | None:
    chosen = [entry for entry in readable if entry[2].has_rank and not entry[1].fault]
    if not chosen:
        return None
    footers = [footer for _, _, footer in chosen]
    remote = any(source.remote for source, _, _ in chosen)
    if remote or not fits_in_memory(sum(footer.rows for footer in footers)):
        return ranks_from_footers(footers)
    reader = RankReader(footers)
    for source, report, _ in chosen:
        with _fault_of(report), _opened(source) as file:
            reader.add(file)
    return reader.report()


def _group_schemas(files: list[FileReport]) -> list[dict[str, Any]]:
    """Group the files by their columns; the order of columns does not matter to anyone."""
    groups: dict[str, dict[str, Any]] = {}
    for file in files:
        if not file.columns:
            continue
        key = str(sorted(file.columns.items()))
        group = groups.setdefault(key, {"columns": file.columns, "files": []})
        group["files"].append(file.name)
    return sorted(groups.values(), key=lambda group: -len(group["files"]))


def _notices(files: list[FileReport], schemas: list[dict[str, Any]]) -> list[str]:
    notices = [f"{file.name} {file.fault}" for file in files if file.fault]
    for other in schemas[1:]:
        usual, columns = schemas[0]["columns"], other["columns"]
        differences = [f"no {name}" for name in usual if name not in columns]
        differences += [f"also {name}" for name in columns if name not in usual]
        differences += [
            f"{name} is {columns[name]}, not {usual[name]}"
            for name in columns
            if name in usual and columns[name] != usual[name]
        ]
        names = other["files"]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        notices.append(f"{names[0]}{more}: other columns ({'; '.join(differences)})")
    notices += [f"{file.name} has no rows" for file in files if not file.rows and not file.fault]
    return notices + _missing_parts(files)


def _missing_parts(files: list[FileReport]) -> list[str]:
    """Spark numbers its files; a gap may be a file that was never brought here."""
    numbers: dict[str, set[int]] = {}
    for file in files:
        match = _PART.search(Path(file.name).name)
        if match:
            numbers.setdefault(str(Path(file.name).parent), set()).add(int(match[1]))
    notices = []
    for folder, found in numbers.items():
        gaps = sorted(set(range(max(found) + 1)) - found)
        if gaps and len(found) > 1:
            some = ", ".join(map(str, gaps[:5])) + (" ..." if len(gaps) > 5 else "")
            notices.append(f"{folder}: {counted(len(gaps), 'part number')} left out ({some})")
    return notices


def _verdict(report: Report) -> list[str]:
    """Say what convert will do with these files."""
    readable = [file for file in report.files if not file.fault]
    lines = []
    if report.faults:
        lines.append(f"{_STOPS}: {counted(len(report.faults), 'file')} cannot be read")
    textless = [file for file in readable if file.text_bytes is None]
    if textless:
        kind = textless[0].columns.get(TEXT)
        what = f"its text is {kind}, not a string" if kind else "it has no column text"
        lines.append(f"{_STOPS} at {textless[0].name}: {what}")
    if report.text is not None:
        documents = _documents(report, report.text)
        lines.append(documents)
        if not documents.startswith(_STOPS):
            lines.append(_order_to_use(report, readable))
            if report.text.tokens is not None:
                lines.append(_output(report, report.text))
    return lines


def _documents(report: Report, text: TextReport) -> str:
    if text.invalid:
        verb = "is" if text.invalid == 1 else "are"
        return f"{_STOPS}: {text.invalid:,} of the texts that were looked at {verb} not UTF-8"
    if text.every_row:
        about, skipped = "", text.nulls + text.empty
    else:
        known = [file.text_nulls for file in report.files if file.text_bytes is not None]
        each = report.rows / max(text.rows, 1)
        nulls = text.nulls * each if None in known else sum(count or 0 for count in known)
        about, skipped = "about ", round(nulls + text.empty * each)
    if report.rows <= skipped:
        return f"{_STOPS}: no row has a text"
    return (
        f"convert writes {about}{counted(report.rows - skipped, 'document')} and skips "
        f"{about}{skipped:,} null or empty rows"
    )


def _order_to_use(report: Report, readable: list[FileReport]) -> str:
    ranked = [file for file in readable if RANK in file.columns]
    rank = report.rank
    if not ranked:
        return "there is no rank: --order file, the rows as they lie"
    if len(ranked) < len(readable) or rank is None or rank.rows < sum(f.rows for f in readable):
        return "not all files have a numeric rank: --order rank stops, --order file is left"
    if rank.low is None or rank.high is None:
        return "no rank is set: --order rank stops, --order file is left"
    if rank.nulls:
        return f"{counted(rank.nulls, 'row')} without a rank: --order rank stops at the first"
    if rank.too_large:
        return "ranks of 2^63 and more: --order rank stops, --order file is left"
    if not rank.complete:
        lies = "the rows are put in order"
    elif is_ordered(rank):
        lies = "the rows lie in that order already"
    else:
        lies = "the rows are put in order"
    ties = f"; {rank.duplicates:,} equal ones follow by file and row" if rank.duplicates else ""
    return f"--order rank goes from {rank.low:,} to {rank.high:,}; {lies}{ties}"


def is_ordered(rank: RankReport) -> bool:
    """Whether reading the files by name gives the rows in ascending rank."""
    return set(rank.in_files) <= {"ascending", "equal"} and rank.across_files in (
        "ascending",
        "single",
    )


def _output(report: Report, text: TextReport) -> str:
    assert text.tokens is not None
    documents = report.rows * (1 - (text.nulls + text.empty) / max(text.rows, 1))
    tokens = documents * (text.tokens.mean + 1)  # one end-of-document token each
    # 4 bytes a token; of a document 20 in .idx, and 4 of row, 8 of rank, 4 of order beside it
    needed = 4 * tokens + 36 * documents
    about = "" if text.every_row else "about "
    return f"the output is {about}{tokens / 1e6:,.3f} M tokens, {human_bytes(needed)} as int32"
