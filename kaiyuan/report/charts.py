"""The charts of a page, as values that its script draws (templates/charts.js)."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kaiyuan.report.data import PhaseData
from kaiyuan.report.events import further_series
from kaiyuan.report.reduce import knots, smooth, smoothing_window, thin
from kaiyuan.report.results import Evaluation, Validation
from kaiyuan.report.run import Array, Run

Chart = dict[str, Any]
# Tasks in one chart of scores; the table has all.
_MOST_TASKS = 8
# A curve is shown in decades where its highest value is so many times the usual one.
_DECADES = 30


def axes(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return what the x axis of each run needs: its phases, resumes, and tokens by step."""
    return [
        {
            "name": run.name,
            "last": max(run.planned_steps, int(run.steps[-1])),
            "phases": [[p.name, p.first_step, p.last_step] for p in run.phases],
            "resumes": [
                part.start.step
                for part in run.parts
                if part.resumed and part.start.step <= run.steps[-1]
            ],
            "tokens": knots(
                np.concatenate(([0], run.steps)), np.concatenate(([0], run.columns["tokens"]))
            ),
        }
        for run in runs
    ]


def training_charts(runs: Sequence[Run]) -> list[Chart]:
    """Return loss, learning rate, gradient norm and speed of one run, or of several together."""
    clip = {run.phases[0].arguments.get("clip_grad") for run in runs}
    limit = clip.pop() if len(clip) == 1 else None
    charts = [
        _curve(runs, "loss", "loss", "Loss", "nats a token"),
        {
            **_chart("learning_rate", "Learning rate", "after the step"),
            "series": [s for i, run in enumerate(runs) for s in _rates(run, i, len(runs) > 1)],
        },
        {
            **_curve(runs, "grad_norm", "grad_norm", "Gradient norm", "before clipping"),
            "marks": [[limit, f"clipped at {limit:g}"]] if limit else [],
        },
        _curve(runs, "tokens_per_second", "speed", "Speed", "tokens/s in all", zero=True),
    ]
    share = _curve(runs, "mfu", "mfu", "MFU", "share of the bf16 peak", zero=True, percent=True)
    work = _curve(runs, "tflops", "tflops", "Work", "TFLOP/s a device", zero=True)
    charts.append(share if len(share["series"]) >= len(work["series"]) else work)
    return [chart for chart in charts if chart["series"]]


def _chart(name: str, title: str, unit: str, **options: Any) -> Chart:
    return {"id": name, "title": title, "unit": unit, **options}


def _series(name: str, run: int, x: Array, y: Array, **style: Any) -> dict[str, Any]:
    xs, ys = thin(x, y)
    return {"name": name, "run": run, "x": xs, "y": ys, **style}


def _curve(
    runs: Sequence[Run], column: str, name: str, title: str, unit: str, **options: Any
) -> Chart:
    """Return a column of loss.csv: raw and smoothed, or of several runs only smoothed."""
    window = smoothing_window(max(len(run.steps) for run in runs))
    series = []
    highest = 0.0
    for i, run in enumerate(runs):
        values = run.columns[column]
        finite = values[np.isfinite(values)]
        if not len(finite):
            continue
        highest = max(highest, float(finite.max() / max(np.median(finite), 1e-12)))
        mean = smooth(values, run.rows_of_phases(), window)
        if len(runs) == 1:
            series.append(_series("each step", i, run.steps, values, style="raw", color=0))
            label = f"mean of {window:,} steps"
            series.append(_series(label, i, run.steps, mean, style="main", color=0))
        else:
            series.append(_series(run.name, i, run.steps, mean, style=_style(i), color=i))
    if len(runs) > 1:
        options["note"] = f"means of {window:,} steps"
    decades = highest > _DECADES and not options.get("zero")
    return _chart(name, title, unit, log=decades, **options) | {"series": series}


def _rates(run: Run, i: int, several: bool) -> Iterator[dict[str, Any]]:
    """Yield the learning rate as recorded, and of a single run as planned too."""
    color = i if several else 0
    label = run.name if several else "recorded"
    if not several:
        steps = np.arange(1, run.planned_steps + 1)
        planned = np.array(planned_rates(run, steps.tolist()))
        yield _series("planned", i, steps, planned, style="beneath", color=1)
    rates = run.columns["learning_rate"]
    style = _style(i) if several else "main"
    yield _series(label, i, run.steps, rates, style=style, color=color)


def _style(run: int) -> str:
    """Return the style of one of several runs; the first is wide, to be seen below its equals."""
    return "main" if run else "first"


def planned_rates(run: Run, steps: Sequence[int]) -> list[float]:
    """Return the learning rate after each step as the plan has it, NaN beyond its end."""
    rates = []
    for step in steps:
        phase = next((p for p in run.phases if step <= p.last_step), None)
        rates.append(math.nan if phase is None else phase.learning_rate(step))
    return rates


def validation_charts(runs: Sequence[Run], found: Sequence[Sequence[Validation]]) -> list[Chart]:
    """Return the loss on held-out data by checkpoint, a chart for each of the data."""
    charts = []
    for name in dict.fromkeys(v.name for mine in found for v in mine):
        series = [
            _series(
                run.name if len(runs) > 1 else name,
                i,
                np.array(v.steps),
                np.array(v.losses),
                style="points",
                color=i,
            )
            for i, (run, mine) in enumerate(zip(runs, found, strict=True))
            for v in mine
            if v.name == name
        ]
        title = f"Validation loss, {name}"
        charts.append(_chart(f"validation-{name}", title, "nats a token") | {"series": series})
    return charts


def evaluation_chart(found: Sequence[Evaluation]) -> list[Chart]:
    """Return the scores of a run by checkpoint, where there is more than one."""
    if len(found) < 2:
        return []
    names = list(dict.fromkeys(name for evaluation in found for name in evaluation.scores))
    series = []
    for color, name in enumerate(names[:_MOST_TASKS]):
        x = np.array([e.step for e in found if name in e.scores])
        y = np.array([e.scores[name][0] for e in found if name in e.scores])
        series.append(_series(name, 0, x, y, style="points", color=color))
    note = f"the first {_MOST_TASKS} of {len(names)}" if len(names) > _MOST_TASKS else ""
    return [_chart("evaluation", "Evaluation", "score", note=note) | {"series": series}]


def data_charts(run: Run, data: Sequence[PhaseData]) -> list[Chart]:
    """Return rank and length of the documents over the steps; what is still to come is dashed."""
    charts = []
    for name, title, unit, values in (
        ("rank", "Rank of the data", "rank of the document", [d.ranks for d in data]),
        ("lengths", "Length of documents", "tokens, mean", [d.lengths for d in data]),
    ):
        x = np.concatenate([d.steps for d in data])
        y = np.concatenate(values)
        done = x <= run.steps[-1]
        # What is to come hangs on to the last point that was trained on.
        ahead = ~done | ((np.arange(len(x)) == done.sum() - 1) & (not done.all()))
        series = [
            _series(label, 0, x[which], y[which], style=style, color=0, breaks=True)
            for label, which, style in (
                ("trained on", done, "main"),
                ("to come", ahead, "plan"),
            )
            if np.isfinite(y[which]).any()
        ]
        if series:
            charts.append(_chart(name, title, unit) | {"series": series})
    return charts


def further_charts(run: Run) -> list[Chart]:
    """Return what TensorBoard has and loss.csv has not."""
    found = further_series(run.folder / "tensorboard", int(run.steps[-1]))
    return [
        _chart(f"event-{number}", tag, "TensorBoard")
        | {"series": [_series(tag, 0, steps, values, style="main", color=0)]}
        for number, (tag, values_of) in enumerate(found.items())
        for steps, values in [values_of]
    ]
