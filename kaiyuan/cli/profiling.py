"""The verb that finds the fastest settings before a training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kaiyuan.cli.training import Model, Overlay, Overrides
from kaiyuan.cli.verbs import Verbs
from kaiyuan.errors import UserError

if TYPE_CHECKING:
    from kaiyuan.profiling.sweep import Result

app = Verbs()


@app.command()
def profile(
    model: Model,
    changes: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder; gone on with if it exists. Default: profile/MODEL.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes; default: one a GPU, or 1.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(help="YAML file, or KEY=[VALUE,...]; repeatable. Default: by model."),
    ] = None,
    overlay: Overlay = None,
    data: Annotated[
        Path | None, typer.Option(help="A converted phase; default: random tokens.")
    ] = None,
    at_most: Annotated[int, typer.Option(min=1, help="Run so many, the best by estimate.")] = 12,
    memory: Annotated[
        float | None, typer.Option(min=0.001, help="GiB a GPU; default: what it has.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="To measure each, after warm-up.")] = 4.0,
    limit: Annotated[float, typer.Option(min=1, help="Give one up after so many seconds.")] = 300.0,
    calibration: Annotated[
        Path | None, typer.Option(help="calibration.json of another sweep, for the estimates.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be run.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Then hold the fastest to its promise.")
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Then trace the fastest.")] = False,
    trace_ranks: Annotated[str, typer.Option(help="Ranks to trace, with commas.")] = "0",
    nsys: Annotated[bool, typer.Option("--nsys", help="Then record it with nsys.")] = False,
    snapshot: Annotated[bool, typer.Option("--snapshot", help="Then record its memory.")] = False,
) -> None:
    """Measure settings of a training for a few steps each, and write the fastest as an overlay.

    Example: kaiyuan profile toy --grid micro_batch_size=[4,8] --grid recompute=none
    """
    import shlex
    import signal

    from kaiyuan.config import load_params
    from kaiyuan.data.phase import ConvertedPhase
    from kaiyuan.files import write_json
    from kaiyuan.preflight import gpu_count
    from kaiyuan.profiling import record
    from kaiyuan.profiling import sweep as verb
    from kaiyuan.profiling.estimate import read_calibration
    from kaiyuan.profiling.grid import candidates, default_grid, read_grid
    from kaiyuan.profiling.table import markdown, ranked, rows, write_all

    params = load_params(model, changes or [], overlay)
    rates = read_calibration(calibration) if calibration else None
    device = verb.Device.of_this_machine()
    processes = nproc or gpu_count() or 1
    ranks = _ranks(trace_ranks, processes)
    if data:
        ConvertedPhase.open(data)
    folder = (output or Path("profile") / params.name).absolute()
    job = verb.Job(folder, device, processes, seconds, limit, data.absolute() if data else None)
    chosen = read_grid(grid or []) or default_grid(params.arguments(params.phases[0]), processes)
    limit_bytes = int(memory * 2**30) if memory else device.memory
    found = candidates(params, chosen, processes)
    run, dropped = verb.choose(found, limit_bytes, at_most)
    if dry_run:
        listed = [verb.Result(each, "to be run") for each in run] + dropped
        typer.echo(markdown(rows(listed, rates or verb.Rates(), device)), nl=False)
        return
    # As Ctrl-C: the processes that are being measured end, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = []
    for number, each in enumerate(run, start=1):
        results.append(verb.measure(each, job))
        typer.echo(f"{number} of {len(run)}: {_line(results[-1])}")
    text = write_all([*results, *dropped], rates, device, folder)
    typer.echo(f"\n{text}")
    best = ranked(results)[0]
    if best.status != verb.MEASURED:
        raise UserError(f"no configuration could be measured; the logs are in {folder / 'runs'}")
    train = ("train", model, *(changes or []), "--overlay", str(folder / "overlay.yaml"))
    typer.echo(f"kaiyuan {shlex.join(train)} --data DATA --output RUN")
    if check:
        promise = verb.check_promise(best, job)
        write_json(folder / "check.json", promise)
        typer.echo(verb.promise_text(promise))
    if trace:
        for path, summary in record.record_trace(best.candidate, job, ranks):
            typer.echo(f"{path}\n{summary}")
    if nsys:
        typer.echo(record.record_nsys(best.candidate, job))
    if snapshot:
        typer.echo(record.record_memory(best.candidate, job))


def _ranks(text: str, processes: int) -> list[int]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) < processes for word in words):
        raise UserError(f"--trace-ranks takes ranks below {processes} with commas, not {text!r}")
    return [int(word) for word in words]


def _line(result: "Result") -> str:
    name = result.candidate.name
    if not result.measured:
        return f"{name}: {result.status}: {result.error[:150]}"
    speed = f"{result.tokens_per_second:,.0f} tokens/s, spread {100 * result.spread:.1f}%"
    return f"{name}: {speed}" + (f", {result.peak / 2**30:.1f} GiB" if result.peak else "")
