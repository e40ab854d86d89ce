"""Start the ranks of one measurement and collect what they say.

Without torchrun, which takes seconds to begin: all ranks are on this machine, and one that fails
ends the others.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = "RESULT "
# NVLink multicast is left alone: on a shared host a program that fails with it can take the link
# down for all.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # Communication that is started before a product has to run before it, too: tensor parallelism
    # overlaps the two only with a single queue of work.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """A training in processes of its own.

    Attributes:
        name: of the logs.
        command: of each rank.
        ranks: number of processes, one a GPU.
        device: GPU of rank 0; the others follow.
        environment: beside what all have.
    """

    name: str
    command: Sequence[str]
    ranks: int
    device: int = 0
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Failed(Exception):
    """A rank failed, or the time was up; the text says which."""


def num_gpus() -> int:
    """Return the number of GPUs, found in a process of its own."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(done.stdout or 0)


def say(value: Mapping[str, Any]) -> None:
    """Hand a rank's result to the process that started it."""
    print(RESULT + json.dumps(value), flush=True)


def run(jobs: Sequence[Job], logs: Path, limit: float) -> list[list[dict[str, Any]] | Failed]:
    """Run jobs side by side, each on GPUs of its own.

    Args:
        jobs: to run.
        logs: folder that gets a log a rank.
        limit: seconds, after which all that still runs is ended.

    Returns:
        For each job the results of its ranks, or why it failed.
    """
    logs.mkdir(parents=True, exist_ok=True)
    processes = [_start(job, logs) for job in jobs]
    deadline = time.monotonic() + limit
    failures: list[Failed | None] = [None] * len(jobs)
    try:
        while any(p.poll() is None for ranks in processes for p in ranks):
            late = time.monotonic() > deadline
            for i, ranks in enumerate(processes):
                running = [p for p in ranks if p.poll() is None]
                wrong = any(p.returncode for p in ranks)
                if running and (late or wrong):
                    failures[i] = Failed(f"more than {limit:.0f} s") if not wrong else None
                    _end(running)
            time.sleep(0.05)
    finally:
        _end([p for ranks in processes for p in ranks if p.poll() is None])
    return [
        failures[i] or _results(job, ranks, logs)
        for i, (job, ranks) in enumerate(zip(jobs, processes, strict=True))
    ]


def _start(job: Job, logs: Path) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python_path = ":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = range(job.device, job.device + job.ranks)
    devices = ",".join(visible[n] if len(visible) > n and visible[n] else str(n) for n in numbers)
    common = {
        **ENVIRONMENT,
        "PYTHONPATH": python_path,
        "CUDA_VISIBLE_DEVICES": devices,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        **job.environment,
    }
    processes = []
    for rank in range(job.ranks):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with _log(job, rank, logs).open("wb") as out:
            processes.append(subprocess.Popen(job.command, env=environment, stdout=out, stderr=out))
    return processes


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    for process in processes:
        process.wait()


def _log(job: Job, rank: int, logs: Path) -> Path:
    return logs / f"{re.sub(r'[^A-Za-z0-9]+', '-', job.name)}.{rank}.log"


def _results(
    job: Job, processes: Sequence[subprocess.Popen[bytes]], logs: Path
) -> list[dict[str, Any]] | Failed:
    texts = [_log(job, rank, logs).read_text(errors="replace") for rank in range(job.ranks)]
    found = [list(_lines(text)) for text in texts]
    codes = [process.returncode for process in processes]
    if not any(codes) and all(found):
        return [lines[-1] for lines in found]
    # Those that were ended because another failed have nothing to say.
    rank = next((i for i, code in enumerate(codes) if code and code > 0), 0)
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line)[:300] for line in texts[rank].splitlines()]
    print("\n".join(lines[-12:]), file=sys.stderr, flush=True)
    errors = [line for line in lines if re.match(r"\S*(Error|Exception)\b", line)]
    return Failed(f"rank {rank}: {errors[-1][:200] if errors else f'exit code {codes[rank]}'}")


def _lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith(RESULT):
            yield json.loads(line.removeprefix(RESULT))
