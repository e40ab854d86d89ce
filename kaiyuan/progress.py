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
            self._bar.update(self._task, completed=self.done)
            now = time.monotonic()
            if self._bar.disable and now - self._last > _LOG_SECONDS:
                self._last = now
                self._log(now)

    def _log(self, now: float) -> None:
        speed = (self.done - self._before) / (now - self._begin)
        left = (self.total - self.done) / speed / 60 if speed > 0 else float("inf")
        print(
            f"{self.name}: {human_bytes(self.done)} of {human_bytes(self.total)}, "
            f"{human_bytes(speed)}/s, {left:.0f} min left",
            file=sys.stderr,
            flush=True,
        )
