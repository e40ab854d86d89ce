"""What a run did: a table of its phases and a picture of its loss."""

import csv
import dataclasses
import statistics
from pathlib import Path
from typing import Any

import rich.box
from rich.table import Table

from kaiyuan.errors import UserError
from kaiyuan.files import atomic_write, read_manifest
from kaiyuan.runfolder import RUN_FILE

# Losses of single batches jump; the start and the end of a phase are means over so many steps.
_WINDOW = 5


@dataclasses.dataclass(frozen=True)
class PhaseReport:
    """One phase of a run.

    Attributes:
        name: of the phase.
        rows: of the parquet files that its data was made of.
        documents: in its data.
        tokens: in its data.
        trained_tokens: that the steps done so far consumed.
        steps: done so far.
        first_loss: mean of the first five steps, nats a token.
        last_loss: mean of the last five.
        seconds: median of a step.
    """

    name: str
    rows: int
    documents: int
    tokens: int
    trained_tokens: int
    steps: int
    first_loss: float
    last_loss: float
    seconds: float


def read_losses(run: Path) -> list[dict[str, str]]:
    """Return the records of a run, one a step; see kaiyuan/megatron/records.py for the columns.

    Raises:
        UserError: there are none.
    """
    try:
        with (run / "loss.csv").open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
    except FileNotFoundError:
        rows = []
    if not rows:
        raise UserError(f"{run} has no record of a training")
    return rows


def phase_reports(run: Path) -> list[PhaseReport]:
    """Return the phases of a run that have begun."""
    phases: list[dict[str, Any]] = read_manifest(run, "run", RUN_FILE)["phases"]
    rows = read_losses(run)
    reports = []
    before = 0
    for phase in phases:
        mine = [row for row in rows if row["phase"] == phase["name"]]
        if not mine:
            continue
        losses = [float(row["loss"]) for row in mine]
        seconds = [float(row["seconds"]) for row in mine if row["seconds"]]
        tokens = int(mine[-1]["tokens"])
        reports.append(
            PhaseReport(
                name=phase["name"],
                rows=phase["rows"],
                documents=phase["documents"],
                tokens=phase["tokens"],
                trained_tokens=tokens - before,
                steps=len(mine),
                first_loss=statistics.fmean(losses[:_WINDOW]),
                last_loss=statistics.fmean(losses[-_WINDOW:]),
                seconds=statistics.median(seconds) if seconds else float("nan"),
            )
        )
        before = tokens
    return reports


def phase_table(run: Path) -> Table:
    """Return the phases as a table for a terminal of 80 columns."""
    names = ("phase", "rows", "docs", "tokens", "trained", "steps", "loss", "s/step")
    table = Table(*names, box=rich.box.SIMPLE, pad_edge=False)
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for phase in phase_reports(run):
        table.add_row(
            phase.name,
            f"{phase.rows:,}",
            f"{phase.documents:,}",
            f"{phase.tokens:,}",
            f"{phase.trained_tokens:,}",
            f"{phase.steps:,}",
            f"{phase.first_loss:.3f} -> {phase.last_loss:.3f}",
            f"{phase.seconds:.2f}",
        )
    return table


def draw_losses(run: Path, picture: Path) -> None:
    """Write a PNG of loss and learning rate over tokens, with the phases marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_losses(run)
    tokens = [int(row["tokens"]) / 1e6 for row in rows]
    figure, (top, bottom) = pyplot.subplots(
        2, sharex=True, figsize=(9, 5.5), height_ratios=(3, 1), layout="constrained"
    )
    top.plot(tokens, [float(row["loss"]) for row in rows], linewidth=1)
    top.set_ylabel("loss (nats a token)")
    bottom.plot(tokens, [float(row["learning_rate"]) for row in rows], color="tab:orange")
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("tokens (millions)")
    begins = 0.0
    for name in dict.fromkeys(row["phase"] for row in rows):
        ends = max(t for t, row in zip(tokens, rows, strict=True) if row["phase"] == name)
        for axis in (top, bottom):
            axis.axvline(ends, color="0.8", linewidth=0.8, zorder=0)
        top.text((begins + ends) / 2, 1.01, name, ha="center", transform=top.get_xaxis_transform())
        begins = ends
    with atomic_write(picture) as stream:
        figure.savefig(stream, format="png", dpi=120)
    pyplot.close(figure)
