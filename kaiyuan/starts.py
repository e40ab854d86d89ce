"""When the processes of a run began, and on what: starts.jsonl, a line each time.

The process that writes loss.csv writes it too, at its first step. Each phase is begun by processes
of its own, and so is whatever goes on after an interruption.
"""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

STARTS = "starts.jsonl"


@dataclasses.dataclass(frozen=True)
class Start:
    """Processes that began, as they were after their first step.

    Attributes:
        step: the first that they did.
        phase: name of the phase.
        time: end of that step, UTC; None where it was not recorded.
        again: steps that had been done before and whose records gave way.
        again_seconds: that those steps had taken.
        layout: how the work is split: processes, parallel sizes, micro-batch, precision.
        versions: of what computes.
        device: name of the GPU, or "cpu".
        data: folder of the phase's data.
    """

    step: int
    phase: str
    time: datetime.datetime | None = None
    again: int = 0
    again_seconds: float = 0.0
    layout: dict[str, Any] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    device: str | None = None
    data: str | None = None


def add_start(run: Path, start: Start) -> None:
    """Append a line; the others are never touched."""
    entry = {**dataclasses.asdict(start), "time": start.time and start.time.isoformat()}
    with (run / STARTS).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry, ensure_ascii=False) + "\n")


def read_starts(run: Path) -> list[Start]:
    """Return the starts in the order of time; a line that was cut short is left out."""
    try:
        lines = (run / STARTS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    names = {field.name for field in dataclasses.fields(Start)}
    found = []
    for line in lines:
        try:
            entry = {key: value for key, value in json.loads(line).items() if key in names}
            time = entry.get("time")
            entry["time"] = datetime.datetime.fromisoformat(time) if time else None
            found.append(Start(**entry))
        except (ValueError, TypeError, AttributeError):
            continue
    return found
