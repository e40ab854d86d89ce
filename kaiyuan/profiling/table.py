"""The results of a sweep: a table, a picture, an overlay for training, a calibration."""

import csv
from pathlib import Path
from typing import Any

import yaml

from kaiyuan.estimate import flops_per_token, peak_tflops
from kaiyuan.files import atomic_write, write_json
from kaiyuan.profiling.estimate import Rates
from kaiyuan.profiling.grid import Candidate
from kaiyuan.profiling.sweep import (
    MEASURED,
    Device,
    Result,
    estimated_peak,
    estimated_seconds,
)

COLUMNS = (
    *("rank", "configuration", "status", "tokens_per_second", "tflops", "mfu"),
    *("step_seconds", "micro_batch_seconds", "rest_seconds", "spread"),
    *("peak_gib", "estimated_gib", "memory_error", "reserved_gib"),
    *("estimated_tokens_per_second", "time_error", "error"),
)


def ranked(results: list[Result]) -> list[Result]:
    """Return the measured ones, fastest first, and then the others."""
    return sorted(
        results, key=lambda r: (r.status != MEASURED, -_speed(r), estimated_seconds(r.candidate))
    )


def _speed(result: Result) -> float:
    return result.tokens_per_second if result.status == MEASURED else 0.0


def calibrate(results: list[Result]) -> tuple[Rates, Result] | None:
    """Fit the estimate of time to one measured configuration.

    That of the params as they are, or else the fastest; None where nothing was measured.
    """
    measured = [r for r in ranked(results) if r.status == MEASURED]
    if not measured:
        return None
    result = next((r for r in measured if not r.candidate.changes), measured[0])
    slowdown = result.step_seconds / estimated_seconds(result.candidate)
    return Rates(slowdown=slowdown), result


def rows(results: list[Result], rates: Rates, device: Device) -> list[dict[str, Any]]:
    """Return the table as values; errors are shares of what was measured."""
    return [_row(i, r, rates, device) for i, r in enumerate(ranked(results), start=1)]


def _row(rank: int, result: Result, rates: Rates, device: Device) -> dict[str, Any]:
    candidate, gib = result.candidate, 2**30
    a = candidate.arguments
    tokens = a["global_batch_size"] * a["seq_length"]
    peak = estimated_peak(candidate)
    speed = tokens / estimated_seconds(candidate, rates)
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    row |= {
        "rank": rank if result.status == MEASURED else "",
        "configuration": candidate.name,
        "status": result.status,
        "estimated_gib": round(peak / gib, 2),
        "estimated_tokens_per_second": round(speed, 1),
        "error": result.error,
    }
    if result.status != MEASURED:
        return row
    gpus = len(result.measured["memory"])
    tflops = result.tokens_per_second * flops_per_token(a) / gpus / 1e12
    best = peak_tflops(device.name)
    row |= {
        "tokens_per_second": round(result.tokens_per_second, 1),
        "tflops": float(f"{tflops:.4g}"),
        "mfu": round(tflops / best, 4) if best else "",
        "step_seconds": round(result.step_seconds, 4),
        "micro_batch_seconds": round(result.time.micro_batch, 5),
        "rest_seconds": round(result.time.rest, 5),
        "spread": round(result.spread, 4),
        "time_error": round(_error(result, rates), 4),
    }
    if result.peak:
        reserved = max(each["reserved"] for each in result.measured["memory"])
        row |= {
            "peak_gib": round(result.peak / gib, 2),
            "memory_error": round(peak / result.peak - 1, 4),
            "reserved_gib": round(reserved / gib, 2),
        }
    return row


def _error(result: Result, rates: Rates) -> float:
    return estimated_seconds(result.candidate, rates) / result.step_seconds - 1


def markdown(table: list[dict[str, Any]]) -> str:
    """Return the table as Markdown that is also read well as it is: padded, no empty columns."""
    head = {
        "rank": "rank",
        "configuration": "configuration",
        "tokens_per_second": "tokens/s",
        "tflops": "TFLOP/s",
        "mfu": "MFU",
        "spread": "spread",
        "peak_gib": "peak GiB",
        "estimated_gib": "estimated GiB",
        "memory_error": "memory error",
        "step_seconds": "s a step",
        "estimated_tokens_per_second": "estimated tokens/s",
        "time_error": "time error",
    }
    shares = ("mfu", "spread", "memory_error", "time_error")
    lines = [list(head.values())]
    for row in table:
        cells = {
            k: f"{100 * row[k]:.1f}%" if k in shares and row[k] != "" else row[k] for k in head
        }
        if row["status"] != MEASURED:
            cells["tokens_per_second"] = f"{row['status']}: {row['error'][:80]}".rstrip(": ")
        lines.append([str(cell) for cell in cells.values()])
    full = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in full]
    padded = [" | ".join(map(str.ljust, line, widths)) for line in zip(*full, strict=True)]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    first, *others = [f"| {line} |\n" for line in padded]
    return "".join([first, f"{rule}\n", *others])


def write_all(results: list[Result], rates: Rates | None, device: Device, folder: Path) -> str:
    """Write table, picture, overlay and calibration; return the table as Markdown.

    Args:
        results: of the sweep.
        rates: calibrated elsewhere; without them one of the results is taken for it.
        device: of the machine.
        folder: to write to.
    """
    own = calibrate(results)
    if own and rates is None:
        rates, source = own
        write_json(
            folder / "calibration.json",
            {
                "slowdown": rates.slowdown,
                "device": device.name,
                "configuration": source.candidate.name,
                "measured_seconds": source.step_seconds,
                "estimated_seconds": estimated_seconds(source.candidate),
            },
        )
    table = rows(results, rates or Rates(), device)
    with atomic_write(folder / "results.csv", "w") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(table)
    text = markdown(table)
    with atomic_write(folder / "results.md", "w") as stream:
        stream.write(text)
    best = ranked(results)[0]
    if best.status == MEASURED:
        with atomic_write(folder / "overlay.yaml", "w") as stream:
            stream.write(overlay(best.candidate, best, device))
        draw(table, folder / "results.png", device)
    return text


def overlay(candidate: Candidate, result: Result, device: Device) -> str:
    """Return what `kaiyuan train --overlay` takes: the arguments that differ from the params."""
    gpus = len(result.measured["memory"])
    body = yaml.safe_dump(candidate.changes, sort_keys=False) if candidate.changes else "{}\n"
    return (
        f"# The fastest configuration on {gpus} x {device.name}: {result.tokens_per_second:,.0f} "
        f"tokens/s at a global batch of {candidate.arguments['global_batch_size']}.\n{body}"
    )


def draw(table: list[dict[str, Any]], path: Path, device: Device) -> None:
    """Draw speed and memory of what was measured, with the estimates as marks."""
    try:
        import matplotlib
    except ImportError:  # a sweep is worth more than its picture
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    measured = [row for row in table if row["status"] == MEASURED][::-1]
    names = [row["configuration"] for row in measured]
    figure, axes = plt.subplots(1, 2, figsize=(12, 1.5 + 0.35 * len(names)), sharey=True)
    pairs = (
        ("tokens_per_second", "estimated_tokens_per_second", "tokens/s"),
        ("peak_gib", "estimated_gib", "peak memory, GiB"),
    )
    for axis, (value, estimate, label) in zip(axes, pairs, strict=True):
        axis.barh(names, [row[value] or 0 for row in measured], color="#4c72b0")
        axis.plot([row[estimate] for row in measured], names, "k|", ms=14, mew=2, label="estimate")
        axis.set_xlabel(label)
        axis.legend(loc="lower right")
    figure.suptitle(device.name)
    figure.tight_layout()
    with atomic_write(path) as stream:
        figure.savefig(stream, format="png", dpi=120)
    plt.close(figure)
