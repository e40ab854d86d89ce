"""What a page says of one run in words and tables."""

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kaiyuan.progress import counted, human_bytes, human_count, human_seconds
from kaiyuan.report.charts import planned_rates
from kaiyuan.report.data import PhaseData
from kaiyuan.report.results import Evaluation, Validation
from kaiyuan.report.run import Part, Run
from kaiyuan.report.table import phase_reports

# Recorded rates are written with nine digits, and Megatron computes in double precision.
_SAME_RATE = 1e-6


@dataclasses.dataclass(frozen=True)
class Grid:
    """A table of a page.

    Attributes:
        title: over the table.
        header: names of the columns; without any the rows are pairs of name and value.
        rows: cells as text.
        note: below the table.
        numbers: all columns but the first are numbers.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    numbers: bool = True


def status(run: Run) -> str:
    """Return in one sentence how far a run is."""
    done, planned = int(run.steps[-1]), run.planned_steps
    if run.finished:
        return f"Finished: all {planned:,} steps, the last on {moment(run.recorded)}"
    left = _median(run, "seconds") * (planned - done)
    pace = f"; {human_seconds(left)} left at its pace" if left == left else ""
    return (
        f"Step {done:,} of {planned:,}, in {run.phase_names[-1]}, recorded on "
        f"{moment(run.recorded)}{pace}"
    )


def moment(time: datetime.datetime | None) -> str:
    """Write a time as people read it, in UTC."""
    return time.astimezone(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC") if time else "unknown"


def tiles(run: Run, found: Sequence[Validation]) -> list[tuple[str, str, str]]:
    """Return the figures that matter most: name, value, and what it is measured in."""
    done, planned = int(run.steps[-1]), run.planned_steps
    last = phase_reports(run)[-1]
    a_step = run.phases[0].arguments["global_batch_size"] * run.sequence_length
    result = [
        ("Steps", f"{done:,}", f"of {planned:,}, {done / planned:.0%}"),
        (
            "Tokens",
            human_count(run.columns["tokens"][-1]),
            f"of {human_count(planned * a_step)}",
        ),
        ("Loss", f"{last.last_loss:.3f}", f"nats a token, last {counted(last.window, 'step')}"),
    ]
    if found and found[0].losses:
        text = f"nats a token on {found[0].name}"
        result.append(("Validation", f"{found[0].losses[-1]:.3f}", text))
    speed, mfu, tflops = (_median(run, name) for name in ("tokens_per_second", "mfu", "tflops"))
    if speed == speed:
        result.append(("Speed", human_count(speed), "tokens/s, median"))
    if mfu == mfu:
        result.append(("MFU", f"{mfu:.1%}", f"{tflops:,.0f} TFLOP/s a GPU"))
    result.append(("Time", human_seconds(training_seconds(run)), "in steps"))
    return result


def training_seconds(run: Run) -> float:
    """Return the time of all steps that count; the first of each start was not measured."""
    return float(np.nansum(run.columns["seconds"]))


def _median(run: Run, column: str) -> float:
    values = run.columns[column]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else float("nan")


def phase_grid(run: Run) -> Grid:
    """Return the plan of each phase beside what happened, a column a phase."""
    reports = {report.name: report for report in phase_reports(run)}
    began = {part.start.phase: part.start.time for part in reversed(run.parts)}
    columns = []
    for phase in run.phases:
        tokens = phase.samples * run.sequence_length
        rates = planned_rates(run, [phase.first_step + 1, phase.last_step])
        report = reports.get(phase.name)
        columns.append(
            {
                "steps planned": f"{phase.steps:,}",
                "steps done": f"{report.steps if report else 0:,}",
                "tokens planned": f"{tokens:,}",
                "tokens trained on": f"{report.trained_tokens if report else 0:,}",
                "of the phase's data": f"{tokens / phase.tokens:.1%}" if phase.tokens else "",
                "learning rate planned": _span(rates[0], rates[1], ".3g"),
                "learning rate recorded": _span(report.first_rate, report.last_rate, ".3g")
                if report
                else "",
                "loss": _span(report.first_loss, report.last_loss, ".3f") if report else "",
                "seconds a step": f"{report.seconds:.3g}" if report else "",
                "first step ended, UTC": f"{time:%Y-%m-%d %H:%M}"
                if (time := began.get(phase.name))
                else "",
            }
        )
    names = [phase.name for phase in run.phases]
    return Grid("Plan and outcome", ["", *names], _turned(columns), _rates_note(run))


def _span(first: float, last: float, digits: str) -> str:
    texts = list(dict.fromkeys(f"{value:{digits}}" for value in (first, last)))
    return " → ".join(texts)


def _turned(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return rows of columns that are given by name; a row that is empty throughout is left out."""
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return [row for row in rows if any(row[1:])]


def _rates_note(run: Run) -> str:
    recorded = run.columns["learning_rate"]
    planned = np.array(planned_rates(run, run.steps.tolist()))
    with np.errstate(divide="ignore", invalid="ignore"):
        off = np.abs(recorded - planned) / np.maximum(planned, 1e-30)
    differs = np.flatnonzero(~(off < _SAME_RATE))
    if not len(differs):
        return "Every recorded learning rate is the planned one."
    first = int(run.steps[differs[0]])
    return (
        f"The recorded learning rate differs from the plan at {counted(len(differs), 'step')}, "
        f"first at step {first:,}: {recorded[differs[0]]:.4g} instead of "
        f"{planned[differs[0]]:.4g}."
    )


def interruption_grid(run: Run) -> Grid:
    """Return where processes went on in the midst of a phase, and what it cost."""
    rows = []
    for before, part in zip([None, *run.parts], run.parts, strict=False):
        if not part.resumed:
            continue
        again = counted(part.start.again, "step") if part.start.again else "none"
        if part.start.again_seconds:
            again += f", {human_seconds(part.start.again_seconds)}"
        rows.append(
            [
                moment(part.start.time),
                part.start.phase,
                f"{part.start.step:,}",
                again,
                "unknown" if part.away is None else human_seconds(max(part.away, 0)),
                _layout_change(before, part) or "none",
            ]
        )
    note = "Time away runs from the last step before to the end of the first after it, start-up "
    note += "included, and is no part of any speed on this page."
    header = ["first step ended", "phase", "went on with step", "done again", "away", "changed"]
    if not rows:
        return Grid("Interruptions", [], [], "None: each phase was trained in one go.")
    return Grid("Interruptions", header, rows, note, numbers=False)


def _layout_change(before: Part | None, part: Part) -> str:
    if before is None:
        return ""
    old, new = (_environment(each) for each in (before, part))
    names = [name for name in new if name in old and old[name] != new[name]]
    return ", ".join(f"{name}: {old[name]} → {new[name]}" for name in names)


def validation_grid(found: Sequence[Validation]) -> Grid | None:
    """Return the losses on held-out data by checkpoint."""
    if not found:
        return None
    header = ["step"]
    for validation in found:
        header += [f"{validation.name}: nats a token", f"{validation.name}: bits a byte"]
    steps = sorted({step for validation in found for step in validation.steps})
    rows = []
    for step in steps:
        row = [f"{step:,}"]
        for v in found:
            place = v.steps.index(step) if step in v.steps else None
            row += (
                ["", ""]
                if place is None
                else [f"{v.losses[place]:.4f}", f"{v.bits_per_byte[place]:.4f}"]
            )
        rows.append(row)
    return Grid("Validation", header, rows)


def evaluation_grid(found: Sequence[Evaluation]) -> Grid | None:
    """Return the scores by task and checkpoint."""
    if not found:
        return None
    rows = []
    for name in dict.fromkeys(name for evaluation in found for name in evaluation.scores):
        row = [name]
        for evaluation in found:
            value, error = evaluation.scores.get(name, (float("nan"), float("nan")))
            text = "" if value != value else f"{value:.4f}"
            row.append(text + ("" if error != error else f" ± {error:.4f}"))
        rows.append(row)
    header = ["task", *(f"step {evaluation.step:,}" for evaluation in found)]
    return Grid("Evaluation", header, rows, "± is the standard error.")


def data_grid(run: Run, data: Sequence[PhaseData]) -> Grid:
    """Return what each phase's data consist of, as far as their manifests say."""
    described = {phase["name"]: phase for phase in run.manifest["phases"]}
    total = sum(phase.samples for phase in run.phases)
    columns = []
    missing: dict[str, list[str]] = {}
    for each in data:
        phase = described[each.plan.name]
        column = {"share of the training": f"{each.plan.samples / total:.1%}"}
        for name in ("rows", "documents", "tokens"):
            column[name] = f"{phase[name]:,}" if phase[name] else ""
        manifest: Mapping[str, Any] | None = each.manifest
        if manifest:
            counts, order = manifest["counts"], manifest["order"]
            ties = f", {order['duplicates']:,} ties" if order["duplicates"] else ""
            column |= {
                "tokens a document": f"{counts['tokens'] / max(counts['documents'], 1):,.0f}",
                "text": human_bytes(counts["text_bytes"]),
                "rows without text": f"{counts['null'] + counts['empty']:,}",
                "files": f"{len(manifest['inputs']):,}",
                "order": order["kind"] + ties,
            }
        if each.why:
            missing.setdefault(each.why, []).append(each.plan.name)
        columns.append(column)
    listed = "; ".join(f"{', '.join(phases)}: {why}" for why, phases in missing.items())
    note = f"Not looked into, {listed}." if listed else ""
    names = [each.plan.name for each in data]
    return Grid("Data", ["", *names], _turned(columns), note)


def _environment(part: Part) -> dict[str, str]:
    start = part.start
    found = {"device": start.device or "", **start.layout, **start.versions}
    return {name.replace("_", " "): str(value) for name, value in found.items() if value != ""}


def environment_grid(run: Run) -> Grid:
    """Return on what each range of steps was computed, a column for each that differs."""
    kinds: list[tuple[dict[str, str], int, int]] = []
    for part in run.parts:
        here = _environment(part)
        if not here or part.last_step < part.start.step:
            continue
        if kinds and kinds[-1][0] == here:
            kinds[-1] = (here, kinds[-1][1], part.last_step)
        else:
            kinds.append((here, part.start.step, part.last_step))
    if not kinds:
        return Grid("Environment", [], [], "Not recorded in this run.")
    if len(kinds) == 1:
        return Grid("Environment", [], [list(pair) for pair in kinds[0][0].items()], numbers=False)
    names = list(dict.fromkeys(name for kind, _, _ in kinds for name in kind))
    rows = [[name, *(kind.get(name, "") for kind, _, _ in kinds)] for name in names]
    header = ["", *(f"steps {first:,} to {last:,}" for _, first, last in kinds)]
    return Grid("Environment", header, rows, numbers=False)


def settings(run: Run) -> dict[str, dict[str, str]]:
    """Return each argument's value by phase."""
    found: dict[str, dict[str, str]] = {}
    for phase in run.phases:
        for name, value in phase.arguments.items():
            found.setdefault(name, {})[phase.name] = str(value)
    return found


def argument_grids(run: Run) -> list[Grid]:
    """Return Megatron's arguments: those of all phases, and those that differ."""
    phases = [phase.name for phase in run.phases]
    common, own = [], []
    for name, values in sorted(settings(run).items()):
        if name == "phase_name":
            continue
        if len(values) == len(phases) and len(set(values.values())) == 1:
            common.append([name, values[phases[0]]])
        else:
            own.append([name, *(values.get(phase, "") for phase in phases)])
    note = "Model and schedule; how the work is split stands under Environment."
    return [
        Grid("Arguments that differ between phases", ["", *phases], own),
        Grid("Arguments of all phases", [], common, note, numbers=False),
    ]


def hash_grid(run: Run, data: Sequence[PhaseData]) -> Grid:
    """Return the hashes by which the run and what it was made of can be told."""
    manifest = run.manifest
    rows = [
        ["run.json", manifest["seal"]],
        ["arguments", manifest["arguments_hash"]],
        ["tokenizer", manifest["tokenizer_hash"] or "unknown"],
    ]
    for phase, each in zip(manifest["phases"], data, strict=True):
        rows.append([f"{phase['name']}: content", phase["content_hash"] or "unknown"])
        known: Mapping[str, Any] | None = each.manifest
        if known:
            rows.append([f"{phase['name']}: order", known["order"]["hash"]])
            rows.append([f"{phase['name']}: manifest.json", known["seal"]])
    return Grid("Hashes", [], rows, "SHA-256.", numbers=False)
