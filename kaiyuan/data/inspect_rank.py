"""What the `rank` column says: its values, and whether the rows already lie in its order.

The column is read in full, alone, as 8 bytes a row; what is larger than half of the free memory,
or lies on a hub, is judged by the footers instead.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from kaiyuan.data.footer import RANK, Footer

_CURVE_POINTS = 400
_INT64 = np.iinfo(np.int64).max


@dataclass
class RankReport:
    """Facts about the rank column of some files.

    Attributes:
        types: Arrow type to number of files.
        complete: whether the values were read; else min and max come from the footers, and what
            needs the values is None.
        rows: rows in files that have the column.
        nulls: rows without a rank (NaN counts).
        low, high: smallest and largest rank.
        duplicates: rows whose rank stands in another row before.
        missing: whole numbers between low and high that no row has; None for fractions.
        in_files: files whose rows are "ascending", "descending", "unordered" or all "equal".
        across_files: how the files follow one another, in the order of their names.
        too_large: whether there are whole numbers of 2^63 and more, which no int64 holds.
        curve: position and rank of some rows, for a picture.
    """

    types: dict[str, int]
    complete: bool
    rows: int
    nulls: int | None = None
    low: float | int | None = None
    high: float | int | None = None
    duplicates: int | None = None
    missing: int | None = None
    in_files: dict[str, int] = field(default_factory=dict)
    across_files: str = "unknown"
    too_large: bool = False
    curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def contiguous(self) -> bool | None:
        """Whether each whole number from low to high stands exactly once."""
        if self.missing is None or self.duplicates is None:
            return None
        return self.missing == 0 and self.duplicates == 0


def ranks_from_footers(footers: list[Footer]) -> RankReport:
    """Judge the ranks by the statistics in the footers."""
    groups = [group for footer in footers for group in footer.groups if group.rows]
    report = RankReport(_types(footers), False, sum(footer.rows for footer in footers))
    nulls = [group.rank_nulls for group in groups]
    if None not in nulls:
        report.nulls = sum(count or 0 for count in nulls)
    spans = [
        (group.rank_low, group.rank_high)
        for group in groups
        if group.rank_low is not None and group.rank_high is not None
    ]
    if spans:
        report.low = min(low for low, _ in spans)
        report.high = max(high for _, high in spans)
        report.across_files = _order_of_spans(spans)
        report.too_large = any(isinstance(high, int) and high > _INT64 for _, high in spans)
    return report


def _types(footers: list[Footer]) -> dict[str, int]:
    return dict(Counter(footer.columns[RANK] for footer in footers))


def fits_in_memory(rows: int) -> bool:
    """Whether the ranks of so many rows take less than half of the free memory."""
    return rows * 8 < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2


class RankReader:
    """Gather the ranks of files, one file after the other, into one array."""

    def __init__(self, footers: list[Footer]) -> None:
        self.types = _types(footers)
        rows = sum(footer.rows for footer in footers)
        # uint64 does not fit into int64; its largest values lose their last digits here.
        whole = all("int" in name and name != "uint64" for name in self.types)
        self.values: np.ndarray = np.empty(rows, np.int64 if whole else np.float64)
        self.filled = 0
        self.rows = 0
        self.too_large = False
        self.in_files: dict[str, int] = {}
        self.spans: list[tuple[Any, Any]] = []

    def add(self, file: pq.ParquetFile) -> None:
        """Read the rank column of one file; nothing of it stays if that fails."""
        start, rows = self.filled, self.rows
        try:
            self._fill(file)
        except Exception:
            self.filled, self.rows = start, rows
            raise
        here = self.values[start : self.filled]
        order = _order(here)
        self.in_files[order] = self.in_files.get(order, 0) + 1
        if len(here):
            self.spans.append((here.min().item(), here.max().item()))

    def _fill(self, file: pq.ParquetFile) -> None:
        for batch in file.iter_batches(batch_size=1 << 18, columns=[RANK]):
            column = batch.column(0).drop_null()
            values = column.to_numpy(zero_copy_only=False)
            self.too_large |= values.dtype == np.uint64 and bool(np.any(values > _INT64))
            values = values.astype(self.values.dtype, copy=False)
            values = values[~np.isnan(values)] if values.dtype.kind == "f" else values
            self.values[self.filled : self.filled + len(values)] = values
            self.filled += len(values)
            self.rows += len(batch)

    def report(self) -> RankReport:
        """Judge what was read; the array is sorted in place, so this is the last call."""
        values = self.values[: self.filled]
        report = RankReport(
            self.types, True, self.rows, self.rows - self.filled, in_files=self.in_files
        )
        if not len(values):
            return report
        places = np.unique(np.linspace(0, len(values) - 1, _CURVE_POINTS).astype(np.int64))
        report.curve = [(int(p), float(values[p])) for p in places if np.isfinite(values[p])]
        report.across_files = _order_of_spans(self.spans)
        report.too_large = self.too_large
        values.sort()
        report.low, report.high = values[0].item(), values[-1].item()
        report.duplicates = int(np.count_nonzero(values[1:] == values[:-1]))
        finite = bool(np.isfinite(values[[0, -1]]).all())
        if finite and (values.dtype.kind == "i" or bool(np.all(values == np.floor(values)))):
            distinct = len(values) - report.duplicates
            report.missing = int(report.high) - int(report.low) + 1 - distinct
        return report


def _order(values: np.ndarray) -> str:
    steps = values[1:] >= values[:-1]
    up, down = bool(np.all(steps)), bool(np.all(values[1:] <= values[:-1]))
    if up and down:
        return "equal"
    return "ascending" if up else "descending" if down else "unordered"


def _order_of_spans(spans: list[tuple[Any, Any]]) -> str:
    """Say how ranges of ranks follow one another: in order, or overlapping."""
    if len(spans) < 2:
        return "single"
    pairs = list(pairwise(spans))
    if all(first[1] <= second[0] for first, second in pairs):
        return "ascending"
    if all(first[0] >= second[1] for first, second in pairs):
        return "descending"
    ordered = sorted(spans)
    apart = all(a[1] <= b[0] for a, b in pairwise(ordered))
    return "unordered" if apart else "overlapping"
