"""A plan for people and programs: what will be trained, how long it takes, what it needs."""

import math
from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kaiyuan.config import to_argv
from kaiyuan.errors import UserError
from kaiyuan.estimate import (
    checkpoint_bytes,
    flops_per_token,
    num_parameters,
    parameter_table,
)
from kaiyuan.plan import Plan
from kaiyuan.profiling.estimate import Rates, memory_table, step_time
from kaiyuan.profiling.stages import layers_of_stages
from kaiyuan.progress import counted


def plan_summary(
    plan: Plan, gpus: int = 1, tflops: float | None = None, rates: Rates | None = None
) -> dict[str, Any]:
    """Return everything that `kaiyuan plan` says, as JSON values.

    Args:
        plan: of the training.
        gpus: number of all GPUs.
        tflops: that a GPU is expected to reach, in 10^12 operations a second, counted as
            `kaiyuan.estimate.flops_per_token` counts; None to estimate it.
        rates: of the GPU, for the estimate; those of an H200 by default.

    Raises:
        UserError: the batch does not divide among the GPUs.
    """
    a = plan.phases[0].arguments
    tokens = plan.steps * a["global_batch_size"] * a["seq_length"]
    layout = batch_layout(a, gpus)
    operations = tokens * flops_per_token(a)
    if tflops is None:
        time = step_time(a, layout["data parallel"], rates)
        seconds = plan.steps * time.step(layout["micro-batches a step"])
        tflops = operations / (gpus * seconds * 1e12)
    else:
        seconds = operations / (gpus * tflops * 1e12)
    kept = kept_checkpoints(plan)
    return {
        "model": plan.params.name,
        "parameters": {**parameter_table(a), "total": num_parameters(a)},
        "phases": list(_phases(plan, seconds)),
        "steps": plan.steps,
        "samples": plan.steps * a["global_batch_size"],
        "tokens": tokens,
        "learning_rate_knots": learning_rate_knots(plan),
        "batch": layout,
        "memory_bytes_a_gpu": memory_table(a, layout["data parallel"]),
        "flops_a_token": flops_per_token(a),
        "tflops_a_gpu": tflops,
        "hours": seconds / 3600,
        "checkpoints": {
            "bytes_each": checkpoint_bytes(a),
            "kept": len(kept),
            # The newest is written before the one before it is removed.
            "bytes": (len(kept) + 1) * checkpoint_bytes(a),
        },
        "arguments": {phase.name: phase.argv for phase in plan.phases},
    }


def _phases(plan: Plan, seconds: float) -> Iterator[dict[str, Any]]:
    for phase in plan.phases:
        yield {
            "name": phase.name,
            "source": "converted" if phase.data else "assumed",
            "documents": phase.data.num_documents if phase.data else None,
            "data_tokens": phase.tokens,
            "samples": phase.samples,
            "tokens": phase.samples * phase.arguments["seq_length"],
            "first_step": phase.first_step + 1,
            "last_step": phase.last_step,
            "first_rate": phase.learning_rate(phase.first_step),
            "last_rate": phase.learning_rate(phase.last_step - 1),
            "hours": seconds / 3600 * phase.steps / plan.steps,
        }


def model_processes(arguments: dict[str, Any]) -> int:
    """Return the number of processes that share one copy of the model and of its samples."""
    kinds = ("tensor_model", "pipeline_model", "context")
    return math.prod(arguments.get(f"{kind}_parallel_size", 1) for kind in kinds)


def batch_layout(arguments: dict[str, Any], gpus: int) -> dict[str, int]:
    """Return how a global batch is split among GPUs.

    Raises:
        UserError: it, or the layers among pipeline stages, cannot be split evenly.
    """
    a = arguments
    tp = a.get("tensor_model_parallel_size", 1)
    pp = a.get("pipeline_model_parallel_size", 1)
    cp = a.get("context_parallel_size", 1)
    batch, micro = a["global_batch_size"], a["micro_batch_size"]
    if gpus % model_processes(a):
        raise UserError(
            f"{gpus} processes cannot be split into groups of {tp} x {pp} x {cp} "
            "(tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size)"
        )
    layers_of_stages(a)
    dp = gpus // model_processes(a)
    if batch % (micro * dp):
        raise UserError(
            f"the global batch of {batch} is no multiple of {micro * dp}, the micro-batch of "
            f"{micro} times {dp} data-parallel ranks"
        )
    return {
        "tensor parallel": tp,
        "pipeline parallel": pp,
        "context parallel": cp,
        "data parallel": dp,
        "micro-batch": micro,
        "micro-batches a step": batch // (micro * dp),
        "global batch": batch,
        "tokens a step": batch * a["seq_length"],
    }


def learning_rate_knots(plan: Plan) -> list[tuple[int, float]]:
    """Return (step, learning rate) where the schedule bends, steps counted from 1."""
    steps = []
    for phase in plan.phases:
        steps += [phase.first_step, phase.last_step - 1]
        warmup = phase.arguments.get("lr_warmup_samples") or 0
        bend = warmup // phase.arguments["global_batch_size"]
        if phase.first_step < bend < phase.last_step:
            steps.append(bend)
    knots = [(step + 1, plan.learning_rate(step)) for step in sorted(set(steps))]
    # Where the rate stays as it is on both sides, nothing bends.
    return [
        knot
        for i, knot in enumerate(knots)
        if i in (0, len(knots) - 1) or not knots[i - 1][1] == knot[1] == knots[i + 1][1]
    ]


def kept_checkpoints(plan: Plan, last: int | None = None) -> list[int]:
    """Return the steps whose checkpoints are still there at the end of the training.

    Megatron saves every ``save_interval`` steps and at the end of each phase, and then removes the
    one before it, unless its step is a multiple of ``save_retain_interval``.

    Args:
        plan: of the training.
        last: the step at which it ends, where that is before its end.
    """
    last = plan.steps if last is None else last
    kept: list[int] = []
    for phase in plan.phases:
        if phase.first_step >= last:
            break
        end = min(phase.last_step, last)
        interval = phase.arguments.get("save_interval") or plan.steps
        retain = phase.arguments.get("save_retain_interval")
        begin = phase.first_step // interval + 1
        steps = [n * interval for n in range(begin, end // interval + 1)]
        for step in sorted({*steps, end}):
            if retain and kept and kept[-1] % retain:
                kept.pop()
            kept.append(step)
    return kept


def plan_text(summary: dict[str, Any], plan: Plan) -> Group:
    """Return the tables that `kaiyuan plan` prints."""
    s = summary
    parameters = _two_columns(f"{s['model']}: parameters", s["parameters"])
    memory = s["memory_bytes_a_gpu"]
    gigabytes = {part: f"{size / 1e9:.1f} GB" for part, size in memory.items()}
    gigabytes["sum, without 1 to 3 GB of context and reserve"] = (
        f"{sum(memory.values()) / 1e9:.1f} GB"
    )
    return Group(
        parameters,
        _phase_table(s),
        _two_columns(
            "learning rate at step", {f"{k:,}": f"{v:.4g}" for k, v in s["learning_rate_knots"]}
        ),
        _two_columns("batch", s["batch"]),
        _two_columns("memory a GPU", gigabytes),
        Text(_time_and_space(s)),
        Text(_arguments_text(plan)),
    )


def _phase_table(s: dict[str, Any]) -> Table:
    table = Table("phase", "documents", "tokens", "trained on", "samples", "steps", "hours")
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for phase in s["phases"]:
        assumed = phase["source"] == "assumed"
        table.add_row(
            phase["name"],
            "" if assumed else f"{phase['documents']:,}",
            _billions(phase["data_tokens"]) + ("*" if assumed else ""),
            _billions(phase["tokens"]),
            _billions(phase["samples"]),
            f"{phase['first_step']:,} to {phase['last_step']:,}",
            f"{phase['hours']:,.1f}",
        )
    table.add_row(
        *("all", "", "", _billions(s["tokens"]), _billions(s["samples"]), f"{s['steps']:,}"),
        f"{s['hours']:,.1f}",
    )
    if any(phase["source"] == "assumed" for phase in s["phases"]):
        table.caption = "* assumed by data.yaml: the phase is not converted yet"
    return table


def _billions(count: int) -> str:
    return f"{count / 1e9:,.3f} B" if count >= 1e9 else f"{count:,}"


def _two_columns(title: str, rows: dict[str, Any]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
    return table


def _time_and_space(s: dict[str, Any]) -> str:
    each, number = s["checkpoints"]["bytes_each"], s["checkpoints"]["kept"]
    b = s["batch"]
    kinds = ("data parallel", "tensor parallel", "pipeline parallel", "context parallel")
    gpus = math.prod(b[kind] for kind in kinds)
    return (
        f"{s['hours']:,.1f} hours on {counted(gpus, 'GPU')} at {s['tflops_a_gpu']:.4g} TFLOP/s "
        f"each, for {s['flops_a_token'] / 1e9:.3f} GFLOP a token (forward and backward matrix "
        "products, causal attention counted as half, as Megatron counts)\n"
        f"{number} checkpoints of {each / 1e9:.1f} GB are kept; with the one that is being "
        f"written, {s['checkpoints']['bytes'] / 1e9:,.0f} GB\n"
    )


def _arguments_text(plan: Plan) -> str:
    common = {
        key: value
        for key, value in plan.phases[0].arguments.items()
        if all(phase.arguments.get(key) == value for phase in plan.phases)
    }
    lines = ["Megatron's arguments in all phases:", "  " + " ".join(to_argv(common))]
    for phase in plan.phases:
        own = {key: value for key, value in phase.arguments.items() if key not in common}
        lines.append(f"{phase.name}: {' '.join(to_argv(own))}")
    return "\n".join(lines)
