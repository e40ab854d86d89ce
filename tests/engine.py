"""Trainings of a toy for the tests of the engine."""

import contextlib
import csv
import os
import subprocess
import sys
import time
from pathlib import Path

from .conftest import ROOT


def start(
    run: Path, data: Path, params, *more, spoil="", path=(), environment=None, **popen
) -> subprocess.Popen:
    """Start `kaiyuan train` with processes that note the samples they train on.

    `path` has folders to import from besides, `environment` variables that differ.
    """
    changes = environment or {}
    spied = run.with_name(f"{run.name}-samples")
    spied.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "KAIYUAN_SPY": str(spied), "KAIYUAN_SPOIL": spoil}
    environment |= {"COLUMNS": "500", "NO_COLOR": "1", **changes}
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    environment["PYTHONPATH"] = ":".join(map(str, [ROOT, *path, *inherited]))
    command = [sys.executable, "-m", "tests.spied_kaiyuan", "train", params, "--data", data]
    command += ["--output", run, *more]
    return subprocess.Popen(
        list(map(str, command)),
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        **popen,
    )


def train(run: Path, data: Path, params, *more, check=0, **options) -> str:
    """Run it to its end and return what it said."""
    process = start(run, data, params, *more, **options)
    out, error = process.communicate()
    assert process.returncode == check, out + error
    return out + error


def wait_for(condition, process) -> None:
    """Wait until a training that runs has come so far."""
    deadline = time.monotonic() + 180
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def steps_done(run: Path) -> int:
    """Return the number of recorded steps of a run that may be going."""
    with contextlib.suppress(FileNotFoundError):
        return len(records(run))
    return 0


def children(process: int) -> list[int]:
    """Return the processes that one started."""
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(n) for task in tasks for n in (task / "children").read_text().split()]


def records(run: Path) -> list[dict[str, str]]:
    with (run / "loss.csv").open() as stream:
        return list(csv.DictReader(stream))


def losses(run: Path) -> list[str]:
    """Return the losses as they were written: nine digits, which tell any two fp32 apart."""
    return [row["loss"] for row in records(run)]


def samples(run: Path) -> list[str]:
    """Return the hashes of the samples that the run's steps were trained on, in order.

    A step that was done again after an interruption counts as it was done last.
    """
    taken: dict[tuple[int, int, int], list[str]] = {}
    for file in run.with_name(f"{run.name}-samples").iterdir():
        for line in file.read_text().splitlines():
            iteration, number, rank, *rows = line.split()
            taken[int(iteration), int(number), int(rank)] = rows
    return [row for _, rows in sorted(taken.items()) for row in rows]
