"""Verbs that plan, run and show a training."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kaiyuan.cli.verbs import PathOrName, Verbs

app = Verbs()

Overlay = Annotated[
    Path | None,
    typer.Option(help="YAML of arguments to change, as kaiyuan profile writes it."),
]

DataFolder = Annotated[
    Path | None, typer.Option(help="Folder with the converted phases, phase1 to phase5.")
]
Model = Annotated[
    PathOrName,
    typer.Argument(help="toy, gpt_smoke, qwen3_1p7b, kaiyuan_2b_fp16, or a params folder."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Megatron arguments to change: lr=6e-3, or phase5.min_lr=1e-4 for one phase.",
    ),
]


@app.command()
def plan(
    model: Model,
    changes: Overrides = None,
    data: DataFolder = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of all GPUs.")] = 1,
    tflops: Annotated[
        float | None, typer.Option(min=0.001, help="Of each GPU, TFLOP/s; default: estimated.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="calibration.json of kaiyuan profile, for the estimate.")
    ] = None,
    overlay: Overlay = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a training will do and need; no GPU, torch or data is needed.

    Example: kaiyuan plan qwen3_1p7b --gpus 64 micro_batch_size=8
    """
    from rich.console import Console

    from kaiyuan.config import load_params
    from kaiyuan.plan import make_plan
    from kaiyuan.plan_summary import plan_summary, plan_text
    from kaiyuan.profiling.estimate import read_calibration

    planned = make_plan(load_params(model, changes or [], overlay), data)
    rates = read_calibration(calibration) if calibration else None
    summary = plan_summary(planned, gpus, tflops, rates)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
    else:
        console = Console(soft_wrap=True)
        console.width = max(console.width, 100)
        console.print(plan_text(summary, planned))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Say what Ctrl-C left; while processes train, it is the wish to save and end instead."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("kaiyuan: interrupted; the same command goes on", err=True)
        raise typer.Exit(130) from None


@app.command()
@_interruptible()
def train(
    model: Model,
    data: Annotated[Path, typer.Option(help="Folder with the converted phases.")],
    output: Annotated[Path, typer.Option(help="Folder of the run; gone on with if it exists.")],
    changes: Overrides = None,
    overlay: Overlay = None,
    phase: Annotated[str | None, typer.Option(help="Train this phase only.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Held against the data's, and noted for export; else one beside them."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes here; default: one a GPU, or 1.")
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Number of this machine.")] = 0,
    master: Annotated[str, typer.Option(help="HOST:PORT of machine 0, if several.")] = "",
    verify_data: Annotated[
        bool, typer.Option("--verify-data", help="Compare all data with its hashes first.")
    ] = False,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Go on though the plan was changed.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Check everything and end.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and end.")] = False,
) -> None:
    """Train all phases, or one; the same command goes on with an interrupted run.

    The exit code is 75 where a signal stopped it: saved, but not at its end.

    Example: kaiyuan train toy --data toy/data --output toy/faster lr=6e-3
    """
    import shlex

    from kaiyuan.config import load_params
    from kaiyuan.plan import make_plan
    from kaiyuan.preflight import gpu_count, preflight, tokenizer_beside
    from kaiyuan.runfolder import recorded
    from kaiyuan.train import STOPPED, Nodes, check_layout, chosen_phases, phase_arguments, train

    params = load_params(model, changes or [], overlay)
    nodes = Nodes(nproc or gpu_count() or 1, nnodes, node_rank, master)
    if dry_run:
        plan = make_plan(params, data)
        check_layout(params, nodes)
        for each in chosen_phases(plan, phase):
            typer.echo(f"# {each.name}")
            typer.echo(shlex.join([*nodes.command(), *phase_arguments(each, data, output)]))
        return
    plan = preflight(params, data, output, nodes, tokenizer, phase, verify_data, allow_change)
    if check:
        typer.echo(f"ready to train {plan.params.name}: {plan.steps:,} steps in all")
        return
    tokenizer = tokenizer or tokenizer_beside(plan, data)
    if tokenizer is None and not (recorded(output) or {}).get("tokenizer"):
        typer.echo("no tokenizer is noted, so export and generate will ask for it: see --tokenizer")
    ended = train(plan, data, output, nodes, tokenizer, phase, allow_change=allow_change)
    planned = ("exit_interval", "exit_duration_in_mins")
    if not (ended or any(each.arguments.get(name) for each in plan.phases for name in planned)):
        raise typer.Exit(STOPPED)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    output: Annotated[
        Path | None,
        typer.Option(help="The page; default: RUN/report.html, of several runs comparison.html."),
    ] = None,
) -> None:
    """Show the phases of runs as tables, and write one HTML page of a run, or that compares them.

    The run may still be going. Example: kaiyuan report toy/run
    """
    from kaiyuan.report.verb import report as verb

    for line in verb(runs, output):
        typer.echo(line)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything that is made.")] = Path("toy"),
) -> None:
    """Run the whole chain, from parquet to a talking model, on a toy; no GPU is needed.

    Example: kaiyuan demo --out toy
    """
    from rich.console import Console

    from kaiyuan import cli
    from kaiyuan.demo import run_demo

    run_demo(out, lambda argv: cli.app(list(argv), standalone_mode=False), Console())
