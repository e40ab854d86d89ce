"""Progress of a long run: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_EVERY_SECONDS = 10.0


class ConversionProgress:
    """Shows rows, tokens, speed and the time that is left, on standard error.

    Args:
        total_bytes: text to convert, as the footers give it.
        done_bytes: what an earlier run has done of it.
    """

    def __init__(self, total_bytes: int, done_bytes: int = 0) -> None:
        self._total, self._before, self._done = total_bytes, done_bytes, done_bytes
        self._rows = self._tokens = self._text_bytes = 0
        self._began = self._shown = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> "ConversionProgress":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("convert"), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=self._total, completed=self._done)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None and self._rows:
            print(f"convert: {self.line()}", file=sys.stderr, flush=True)

    def add(self, announced_bytes: int, counts: dict[str, int]) -> None:
        """Count a finished unit.

        Args:
            announced_bytes: its text as the footer gives it.
            counts: of its record.
        """
        self._done += announced_bytes
        self._rows += counts["rows"]
        self._tokens += counts["tokens"]
        self._text_bytes += counts["text_bytes"]
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=self.line())
        elif time.monotonic() - self._shown > _EVERY_SECONDS:
            self._shown = time.monotonic()
            print(f"convert: {self.line()}", file=sys.stderr, flush=True)

    def line(self) -> str:
        """Return the state in one line."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        pace = (self._done - self._before) / seconds
        left = (self._total - self._done) / pace if pace else 0.0
        return (
            f"{100 * self._done / max(self._total, 1):.0f}%  {self._rows:,} rows  "
            f"{self._tokens:,} tokens  {self._text_bytes / 1e6 / seconds:.1f} MB/s  "
            f"{left:,.0f} s left"
        )


def describe_plan(summary: dict[str, Any]) -> str:
    """Return a dry run's summary (see `Conversion.summary`) for people."""
    note = f" ({summary['encoder_note']})" if summary["encoder_note"] else ""
    return (
        f"reads   {summary['files']:,} files, {summary['input_bytes'] / 1e9:,.2f} GB: "
        f"{summary['rows']:,} rows, about {summary['text_bytes'] / 1e9:,.2f} GB of text\n"
        f"encodes with {summary['encoder']}{note}, ends documents with "
        f"{summary['eod']['token']} ({summary['eod']['id']}), order by {summary['order']}\n"
        f"writes  {summary['shards']:,} shards of {summary['dtype']}, about "
        f"{summary['tokens']:,} tokens\n"
        f"needs   about {summary['disk_bytes'] / 1e9:,.2f} GB of disk"
    )


def describe_manifest(folder: Path, manifest: dict[str, Any]) -> str:
    """Return what was converted for people."""
    counts, order = manifest["counts"], manifest["order"]
    lines = [
        f"{folder}: {counts['documents']:,} documents, {counts['tokens']:,} tokens",
        f"rows    {counts['rows']:,}, of these {counts['null']:,} null and "
        f"{counts['empty']:,} empty left out",
        f"order   by {order['kind']}, hash {order['hash'][:16]}",
    ]
    if order["duplicates"]:
        lines.append(
            f"note    {order['duplicates']:,} documents share their rank with one before them: "
            "taken in the order of file and row"
        )
    return "\n".join(lines)
