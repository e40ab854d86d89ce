"""The phases of a run as a table for a terminal, and its loss as a picture."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import rich.box
from rich.table import Table

from kaiyuan.files import atomic_write
from kaiyuan.report.run import Run

# Losses of single batches jump; the start and the end of a phase are means over so many steps; of a
# short phase over its halves, so that no step is in both.
_WINDOW = 5


@dataclasses.dataclass(frozen=True)
class PhaseReport:
    """One phase of a run.

    Attributes:
        name: of the phase.
        rows: of the parquet files that its data was made of.
        documents: in its data.
        tokens: in its data; like the two before, None where the plan no longer has the phase.
        trained_tokens: that the steps done so far consumed.
        steps: done so far.
        window: steps that each of the two losses is a mean of; they share none.
        first_loss: mean of the first steps, nats a token.
        last_loss: mean of the last steps.
        seconds: median of a step; NaN where none was measured.
        first_rate: learning rate after the first step.
        last_rate: learning rate after the last step.
    """

    name: str
    rows: int | None
    documents: int | None
    tokens: int | None
    trained_tokens: int
    steps: int
    window: int
    first_loss: float
    last_loss: float
    seconds: float
    first_rate: float
    last_rate: float


def phase_reports(run: Run) -> list[PhaseReport]:
    """Return the phases of a run that have begun."""
    described: dict[str, dict[str, Any]] = {p["name"]: p for p in run.manifest["phases"]}
    reports = []
    before = 0
    for rows in run.rows_of_phases():
        name = run.phase_names[rows.start]
        phase = described.get(name, {})
        mine = {name: values[rows] for name, values in run.columns.items()}
        seconds = mine["seconds"][~np.isnan(mine["seconds"])]
        tokens = int(mine["tokens"][-1])
        window = max(1, min(_WINDOW, len(mine["loss"]) // 2))
        reports.append(
            PhaseReport(
                name=name,
                rows=phase.get("rows"),
                documents=phase.get("documents"),
                tokens=phase.get("tokens"),
                trained_tokens=tokens - before,
                steps=len(mine["loss"]),
                window=window,
                first_loss=float(mine["loss"][:window].mean()),
                last_loss=float(mine["loss"][-window:].mean()),
                seconds=float(np.median(seconds)) if len(seconds) else float("nan"),
                first_rate=float(mine["learning_rate"][0]),
                last_rate=float(mine["learning_rate"][-1]),
            )
        )
        before = tokens
    return reports


def phase_table(run: Run) -> Table:
    """Return the phases as a table for a terminal of 80 columns."""
    names = ("phase", "rows", "docs", "tokens", "trained", "steps", "loss", "s/step")
    table = Table(*names, box=rich.box.SIMPLE, pad_edge=False)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for phase in phase_reports(run):
        table.add_row(
            phase.name,
            f"{phase.rows:,}" if phase.rows else "",
            f"{phase.documents:,}" if phase.documents else "",
            f"{phase.tokens:,}" if phase.tokens else "",
            f"{phase.trained_tokens:,}",
            f"{phase.steps:,}",
            f"{phase.first_loss:.3f} -> {phase.last_loss:.3f}",
            f"{phase.seconds:.2f}",
        )
    return table


def draw_losses(run: Run, picture: Path) -> None:
    """Write a PNG of loss and learning rate over tokens, with the phases marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = run.columns["tokens"] / 1e6
    figure, (top, bottom) = pyplot.subplots(
        2, sharex=True, figsize=(9, 5.5), height_ratios=(3, 1), layout="constrained"
    )
    top.plot(tokens, run.columns["loss"], linewidth=1)
    top.set_ylabel("loss (nats a token)")
    bottom.plot(tokens, run.columns["learning_rate"], color="tab:orange")
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("tokens (millions)")
    begins = 0.0
    for rows in run.rows_of_phases():
        ends = tokens[rows][-1]
        for axis in (top, bottom):
            axis.axvline(ends, color="0.8", linewidth=0.8, zorder=0)
        name, place = run.phase_names[rows.start], top.get_xaxis_transform()
        top.text((begins + ends) / 2, 1.01, name, ha="center", transform=place)
        begins = ends
    with atomic_write(picture) as stream:
        figure.savefig(stream, format="png", dpi=120)
    pyplot.close(figure)
