"""Progress of long work: a bar on a terminal, a plain line now and then in a log."""

import sys
import threading
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_LOG_SECONDS = 30.0


def human_bytes(count: float) -> str:
    """Write a number of bytes with a decimal unit: 3.68 TB, 12.0 GB, 635 B."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def human_count(count: float) -> str:
    """Write a number with three digits and a decimal unit: 987, 1.23 M, 2.20 T."""
    for unit in ("", " k", " M", " B"):
        if abs(count) < 999.5:
            return f"{count:.{_decimals(count) if unit or count % 1 else 0}f}{unit}"
        count /= 1000
    return f"{count:.{_decimals(count)}f} T"


def _decimals(count: float) -> int:
    return 2 if abs(count) < 9.995 else 1 if abs(count) < 99.95 else 0


def human_seconds(seconds: float) -> str:
    """Write a time in its two largest units: 41 s, 3 min 20 s, 2 h 5 min, 12 d 3 h."""
    whole = round(seconds)
    for unit, smaller, size in (("d", "h", 86400), ("h", "min", 3600), ("min", "s", 60)):
        if whole >= size:
            below = {"h": 3600, "min": 60, "s": 1}[smaller]
            rest = whole % size // below
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


def counted(count: int, noun: str) -> str:
    """Write a number with its noun: 1 file, 2,112 files."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class ByteProgress:
    """Count bytes of ``total``; threads may call ``advance`` at the same time."""

    def __init__(self, name: str, total: int, done: int = 0) -> None:
        self.name, self.total, self.done = name, total, done
        self._lock = threading.Lock()
        self._begin = self._last = time.monotonic()
        self._before = done
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task(name, total=total, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def advance(self, count: int) -> None:
        """Add bytes; less than zero when some turned out to be worthless."""
        with self._lock:
            self.done += count
            self._bar.update(self._task, completed=self.done, description=self.name)
            now = time.monotonic()
            if self._bar.disable and now - self._last > _LOG_SECONDS:
                self._last = now
                self._log()

    def _log(self) -> None:
        print(f"{self.name}: {self.line()}", file=sys.stderr, flush=True)

    def line(self) -> str:
        """Return the state in one line."""
        speed = (self.done - self._before) / max(time.monotonic() - self._begin, 1e-9)
        left = human_seconds((self.total - self.done) / speed) if speed > 0 else "unknown time"
        return (
            f"{human_bytes(self.done)} of {human_bytes(self.total)}, {human_bytes(speed)}/s, "
            f"{left} left"
        )


class ConversionProgress(ByteProgress):
    """Count the text of a conversion, and its rows and tokens.

    Args:
        total: bytes of text, as the footers give them.
        done: what an earlier run has done of them.
    """

    def __init__(self, total: int, done: int = 0) -> None:
        super().__init__("convert", total, done)
        self._rows = self._tokens = 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._bar.disable and kind is None and self._rows:
            self._log()

    def add(self, announced_bytes: int, counts: dict[str, int]) -> None:
        """Count a finished unit.

        Args:
            announced_bytes: its text as the footer gives it.
            counts: of its record.
        """
        self._rows += counts["rows"]
        self._tokens += counts["tokens"]
        self.advance(announced_bytes)

    def line(self) -> str:
        """Return the state in one line."""
        return f"{self._rows:,} rows, {self._tokens:,} tokens, {super().line()}"
