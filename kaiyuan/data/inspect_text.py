"""What the texts are like, judged by a sample that is spread over all files.

Small corpora are gone through row by row; of large ones only the first rows of row groups all over
the corpus are decoded, so that a terabyte takes as long as a gigabyte.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kaiyuan.data.footer import RANK, TEXT, Footer, Group
from kaiyuan.data.language import look_at

_SMALL = 256 << 20  # bytes of text, uncompressed, that are gone through row by row
_BATCH_BYTES = 1 << 20  # of text decoded at a time: long documents must not pile up
_BATCH_ROWS = (32, 1024)  # whatever the mean length
_TOKENISED = 1_000_000  # characters of a document that are tokenised; the rest by proportion
_SHOWN = 300  # characters of a document that are shown


@dataclass(frozen=True)
class Place:
    """Where to sample: every ``stride``-th of the first ``rows`` rows of a row group.

    ``batch`` is how many rows to decode at a time.
    """

    file: int
    group: int
    rows: int
    stride: int
    batch: int


@dataclass
class Distribution:
    """A distribution of sizes; ``bars`` are (lower edge, count), edges at powers of two."""

    mean: float
    smallest: int
    median: int
    p90: int
    p99: int
    largest: int
    bars: list[tuple[int, int]]


@dataclass
class TextReport:
    """What a sample of the text column shows; shares are of sampled rows, from 0 to 1.

    Attributes:
        rows: rows looked at.
        every_row: whether these were all rows.
        nulls, empty, invalid: rows without text, with an empty one, with broken UTF-8.
        characters, utf8_bytes: lengths of the documents.
        scripts: share of characters by script.
        kinds: share of documents by language or kind.
        tokens: tokens a document, without the end-of-document token; None without a tokenizer.
        bytes_per_token: None without a tokenizer.
        quality: rank correlation (Spearman, within each kind of document) of crude signs of
            quality with `rank`; None without a rank.
        samples: the beginnings of a few documents.
    """

    rows: int
    every_row: bool
    nulls: int
    empty: int
    invalid: int
    characters: Distribution
    utf8_bytes: Distribution
    scripts: dict[str, float]
    kinds: dict[str, float]
    tokens: Distribution | None = None
    bytes_per_token: float | None = None
    quality: dict[str, float] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)


def choose_places(footers: list[Footer], wanted: int) -> list[Place]:
    """Spread a sample of about ``wanted`` rows over the row groups of all files."""
    groups = [
        (file, number, group)
        for file, footer in enumerate(footers)
        for number, group in enumerate(footer.groups)
        if group.rows
    ]
    if sum(group.text_bytes for _, _, group in groups) <= _SMALL:
        stride = max(1, sum(group.rows for _, _, group in groups) // wanted)
        return [Place(f, n, group.rows, stride, _batch(group)) for f, n, group in groups]
    count = min(len(groups), max(50, wanted // 20))
    chosen = [groups[int((index + 0.5) * len(groups) / count)] for index in range(count)]
    each = math.ceil(wanted / count)
    return [Place(f, n, min(each, group.rows), 1, _batch(group)) for f, n, group in chosen]


def _batch(group: Group) -> int:
    low, high = _BATCH_ROWS
    return min(max(low, _BATCH_BYTES * group.rows // max(group.text_bytes, 1)), high)


def sampled_rows(
    file: pq.ParquetFile, place: Place, ranked: bool
) -> Iterator[tuple[bytes | None, float | None]]:
    """Yield text (as bytes, None for null) and rank of the rows of a place."""
    columns = [TEXT, RANK] if ranked else [TEXT]
    seen = 0
    for batch in file.iter_batches(place.batch, row_groups=[place.group], columns=columns):
        end = min(len(batch), place.rows - seen)
        picks = pa.array(np.arange(-seen % place.stride, end, place.stride))
        seen += len(batch)
        texts = _as_bytes(batch.column(TEXT)).take(picks).to_pylist()
        ranks = batch.column(RANK).take(picks).to_pylist() if ranked else [None] * len(texts)
        yield from zip(texts, ranks, strict=True)
        if seen >= place.rows:
            return


def _as_bytes(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.large_binary())  # bytes, since the text may be broken UTF-8


class TextSampler:
    """Take documents one by one and keep numbers, not texts."""

    def __init__(self, tokenizer: Any | None, shown: int) -> None:
        self.tokenizer = tokenizer
        self.shown = shown
        self.rows = self.nulls = self.empty = self.invalid = 0
        self.scripts: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.characters: list[int] = []
        self.bytes: list[int] = []
        self.tokens: list[int] = []
        self.signs: list[tuple[str, float, tuple[float, ...]]] = []
        self.samples: list[dict[str, Any]] = []
        self.chance = random.Random(0)

    def add(self, data: bytes | None, rank: float | None, name: str) -> None:
        """Look at one row."""
        self.rows += 1
        rank = None if rank is None or not math.isfinite(rank) else rank
        if data is None:
            self.nulls += 1
            return
        try:
            text = data.decode()
        except UnicodeDecodeError:
            self.invalid += 1
            text = data.decode(errors="replace")
        self.bytes.append(len(data))
        self.characters.append(len(text))
        if not text:
            self.empty += 1
            return
        looks = look_at(text)
        self.scripts.update(looks.scripts)
        self.kinds[looks.kind] += 1
        if self.tokenizer is not None:
            self.tokens.append(_count_tokens(self.tokenizer, text))
        if rank is not None:
            signs = (math.log(len(text)), looks.sentences, looks.variety)
            self.signs.append((looks.kind, float(rank), signs))
        entry = {"sampled_row": self.rows, "file": name, "rank": rank, "kind": looks.kind}
        self._show({**entry, "characters": len(text), "text": text[:_SHOWN]})

    def _show(self, entry: dict[str, Any]) -> None:
        """Keep a uniform choice of documents to show (reservoir sampling, always the same)."""
        if len(self.samples) < self.shown:
            self.samples.append(entry)
            return
        place = self.chance.randrange(self.rows)
        if place < self.shown:
            self.samples[place] = entry

    def report(self, every_row: bool) -> TextReport:
        """Sum up."""
        characters = max(sum(self.scripts.values()), 1)
        documents = max(sum(self.kinds.values()), 1)
        tokens = sum(self.tokens)
        return TextReport(
            rows=self.rows,
            every_row=every_row,
            nulls=self.nulls,
            empty=self.empty,
            invalid=self.invalid,
            characters=distribution(self.characters),
            utf8_bytes=distribution(self.bytes),
            scripts={name: n / characters for name, n in self.scripts.most_common() if n},
            kinds={name: n / documents for name, n in self.kinds.most_common()},
            tokens=distribution(self.tokens) if self.tokenizer is not None else None,
            bytes_per_token=sum(self.bytes) / tokens if tokens else None,
            quality=_quality(self.signs) if self.signs else None,
            samples=sorted(self.samples, key=lambda entry: entry["sampled_row"]),
        )


def _count_tokens(tokenizer: Any, text: str) -> int:
    head = text[:_TOKENISED]
    count = len(tokenizer.encode(head, add_special_tokens=False).ids)
    return round(count * len(text) / len(head))


def distribution(sizes: list[int]) -> Distribution:
    """Sum up sizes; all zero for an empty list."""
    values = np.sort(np.array(sizes or [0], dtype=np.int64))
    p50, p90, p99 = (int(values[int(q * (len(values) - 1))]) for q in (0.5, 0.9, 0.99))
    edges = [0] + [1 << power for power in range(int(values[-1]).bit_length() + 1)]
    counts, _ = np.histogram(values, bins=edges) if sizes else (np.zeros(1, int), None)
    first = int(np.argmax(counts > 0))
    bars = [(edges[i], int(counts[i])) for i in range(first, len(counts))]
    return Distribution(float(values.mean()), int(values[0]), p50, p90, p99, int(values[-1]), bars)


def _quality(signs: list[tuple[str, float, tuple[float, ...]]]) -> dict[str, float]:
    """Correlate each sign of quality with the rank, within kinds of document, then average."""
    names = ("length", "lines that end as sentences", "lines that do not repeat")
    sums, weight = np.zeros(len(names)), 0
    for kind in {kind for kind, _, _ in signs}:
        ranks = np.array([rank for k, rank, _ in signs if k == kind])
        values = np.array([sign for k, _, sign in signs if k == kind])
        if len(ranks) >= 10:
            sums += len(ranks) * np.array([_spearman(ranks, column) for column in values.T])
            weight += len(ranks)
    return {name: float(s / weight) for name, s in zip(names, sums, strict=True)} if weight else {}


def _spearman(first: np.ndarray, second: np.ndarray) -> float:
    a, b = _mean_ranks(first), _mean_ranks(second)
    spread = a.std() * b.std()
    return float(((a - a.mean()) * (b - b.mean())).mean() / spread) if spread else 0.0


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    """Rank values from 0; equal values share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + last - 1) / 2)[inverse]
