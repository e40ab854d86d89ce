"""A run as it is on the disk, finished or still going: plan, records, starts."""

import dataclasses
import datetime
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from kaiyuan.errors import UserError
from kaiyuan.files import read_manifest
from kaiyuan.plan import PhasePlan
from kaiyuan.runfolder import RUN_FILE
from kaiyuan.starts import Start, read_starts

Array = NDArray[Any]
_WHOLE = ("iteration", "samples", "tokens", "phase_samples")
_REAL = ("loss", "learning_rate", "grad_norm", "seconds", "tokens_per_second", "tflops", "mfu")


@dataclasses.dataclass(frozen=True)
class Part:
    """What the processes of one start did.

    Attributes:
        start: when and on what they began.
        last_step: the last of theirs that counts; before `start.step` where none does.
        seconds: from the end of their first step to the end of their last that counts.
        away: seconds from the last step of those before to the end of the first step, steps that
            were done again not counted; None where it is not known.
        resumed: they went on in the midst of a phase, or began one again.
    """

    start: Start
    last_step: int
    seconds: float
    away: float | None
    resumed: bool


class Run:
    """A run.

    Attributes:
        folder: of the run.
        name: what the run is called among others.
        manifest: run.json.
        phases: as planned; without their data.
        columns: of loss.csv, one value a step in the order of steps; NaN where there is none.
            See kaiyuan/megatron/records.py.
        phase_names: name of the phase of each step.
        parts: what each start of processes did.
        recorded: when the last step ended, UTC; where that is not known, when loss.csv was written.
    """

    def __init__(self, folder: Path, name: str | None = None) -> None:
        """Read a run.

        Raises:
            UserError: it has no run.json or no records, or they are damaged.
        """
        self.folder = folder
        self.name = name or "/".join(folder.resolve().parts[-2:])
        self.manifest = read_manifest(folder, "run", RUN_FILE)
        self.phases = _planned(self.manifest)
        table = _read_losses(folder)
        self.phase_names: list[str] = table.column("phase").to_pylist()
        self.columns: dict[str, Array] = {
            name: table.column(name).to_numpy() for name in (*_WHOLE, *_REAL)
        }
        self.parts = self._parts(self._starts())
        self.recorded = self._last_time()

    @property
    def steps(self) -> Array:
        """Return the numbers of the steps that were done, int64 [steps]."""
        return self.columns["iteration"]

    @property
    def planned_steps(self) -> int:
        """Return the steps of all phases."""
        return self.phases[-1].last_step

    @property
    def finished(self) -> bool:
        """Return whether the last planned step was done."""
        return int(self.steps[-1]) >= self.planned_steps

    @property
    def sequence_length(self) -> int:
        """Return the tokens of a sample."""
        return int(self.phases[0].arguments["seq_length"])

    def rows_of_phases(self) -> list[slice]:
        """Return the rows of each phase that has begun, in the order in which they came."""
        names = np.array(self.phase_names)
        bounds = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist(), len(names)]
        return [slice(a, b) for a, b in itertools.pairwise(bounds)]

    def _last_time(self) -> datetime.datetime:
        if self.parts and (began := self.parts[-1].start.time):
            return began + datetime.timedelta(seconds=self.parts[-1].seconds)
        changed = (self.folder / "loss.csv").stat().st_mtime
        return datetime.datetime.fromtimestamp(changed, datetime.UTC)

    def _starts(self) -> list[Start]:
        """Return all starts, those too that only loss.csv knows of."""
        known = read_starts(self.folder)
        steps = {start.step for start in known}
        first = np.flatnonzero(np.isnan(self.columns["seconds"]))
        older = [
            Start(int(self.steps[row]), self.phase_names[row])
            for row in first
            if int(self.steps[row]) not in steps
        ]
        return older + known

    def _parts(self, starts: list[Start]) -> list[Part]:
        parts: list[Part] = []
        begins = {phase.first_step + 1 for phase in self.phases}
        seen: set[int] = set()
        before: tuple[datetime.datetime, float] | None = None
        for number, start in enumerate(starts):
            later = [other.step for other in starts[number + 1 :]]
            last = min([*later, int(self.steps[-1]) + 1]) - 1
            mine = (self.steps > start.step) & (self.steps <= last)
            seconds = float(np.nansum(self.columns["seconds"][mine]))
            away = None
            if before and start.time:
                ended = before[0] + datetime.timedelta(seconds=before[1] + start.again_seconds)
                away = (start.time - ended).total_seconds()
            # A phase is begun by processes of its own; that is no interruption.
            resumed = start.step not in begins or start.step in seen or start.again > 0
            parts.append(Part(start, last, seconds, away, resumed))
            seen.add(start.step)
            before = (start.time, seconds) if start.time else None
        return parts


def _planned(manifest: dict[str, Any]) -> list[PhasePlan]:
    phases: list[PhasePlan] = []
    done = 0
    for entry in manifest["phases"]:
        phases.append(
            PhasePlan(
                name=entry["name"],
                data=None,
                tokens=entry["tokens"],
                samples=entry["samples"],
                first_step=done,
                last_step=done + entry["steps"],
                arguments=entry["arguments"],
            )
        )
        done += entry["steps"]
    return phases


def _read_losses(folder: Path) -> pa.Table:
    """Read loss.csv, whose last line a running training may be writing."""
    path = folder / "loss.csv"
    if not path.is_file():
        raise UserError(f"{folder} has no record of a training")
    types: dict[str, pa.DataType] = {name: pa.int64() for name in _WHOLE}
    types |= {name: pa.float64() for name in _REAL} | {"phase": pa.string()}
    try:
        table = pyarrow.csv.read_csv(
            path,
            parse_options=pyarrow.csv.ParseOptions(invalid_row_handler=lambda _: "skip"),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=types, include_columns=list(types), null_values=[""]
            ),
        )
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not table.num_rows:
        raise UserError(f"{folder} has no record of a training")
    # Of a step that stands there twice the last record counts.
    steps = table.column("iteration").to_numpy()
    _, last = np.unique(steps[::-1], return_index=True)
    return table.take(len(steps) - 1 - last)
