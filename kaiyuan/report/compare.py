"""What a page says of several runs beside one another."""

from collections.abc import Sequence

from kaiyuan.progress import human_seconds
from kaiyuan.report.facts import Grid, settings, tiles, training_seconds
from kaiyuan.report.results import Evaluation, Validation
from kaiyuan.report.run import Run


def outcome_grid(runs: Sequence[Run], found: Sequence[Sequence[Validation]]) -> Grid:
    """Return what the runs came to, a column a run."""
    columns = []
    for run, validations in zip(runs, found, strict=True):
        # Losses on held-out data get rows of their own, by the name of the data.
        figures = {n: f"{value} {unit}" for n, value, unit in tiles(run, []) if n != "Time"}
        for validation in validations:
            if validation.losses:
                text = f"{validation.losses[-1]:.4f} at step {validation.steps[-1]:,}"
                figures[f"Validation, {validation.name}"] = text
        figures["Time in steps"] = human_seconds(training_seconds(run))
        figures["Interruptions"] = str(sum(part.resumed for part in run.parts))
        columns.append(figures)
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return Grid("Outcome", ["", *(run.name for run in runs)], rows, numbers=False)


def score_grid(runs: Sequence[Run], found: Sequence[Sequence[Evaluation]]) -> Grid | None:
    """Return the scores of the last checkpoint of each run that was evaluated."""
    last = [mine[-1] if mine else None for mine in found]
    names = list(dict.fromkeys(n for evaluation in last if evaluation for n in evaluation.scores))
    if not names:
        return None
    rows = []
    for name in names:
        values = [evaluation and evaluation.scores.get(name) for evaluation in last]
        rows.append([name, *(f"{value[0]:.4f}" if value else "" for value in values)])
    steps = [f"{r.name}, step {e.step:,}" if e else r.name for r, e in zip(runs, last, strict=True)]
    return Grid("Evaluation", ["task", *steps], rows)


def difference_grid(runs: Sequence[Run]) -> Grid:
    """Return the settings in which the runs differ, a column a run."""
    columns = [_settings(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = []
    for name in names:
        values = [column.get(name, "") for column in columns]
        if len(set(values)) > 1:
            rows.append([name, *values])
    note = "" if rows else "None: the plans, data and environments are the same."
    header = ["", *(run.name for run in runs)] if rows else []
    return Grid("Settings that differ", header, rows, note, numbers=False)


def _settings(run: Run) -> dict[str, str]:
    """Return all that may differ: a value, or one for each phase where phases differ."""
    found = {"model": run.manifest["name"], "tokenizer hash": run.manifest["tokenizer_hash"] or ""}
    for phase in run.manifest["phases"]:
        for name in ("steps", "samples", "tokens", "content_hash"):
            found[f"{phase['name']} {name.replace('_', ' ')}"] = str(phase[name])
    for name, values in settings(run).items():
        different = set(values.values())
        by_phase = ", ".join(f"{phase}: {value}" for phase, value in values.items())
        whole = len(different) == 1 and len(values) == len(run.phases)
        found[name] = different.pop() if whole else by_phase
    if run.parts:
        start = run.parts[-1].start
        found |= {k.replace("_", " "): str(v) for k, v in (start.layout | start.versions).items()}
        found["device"] = start.device or ""
    return found
