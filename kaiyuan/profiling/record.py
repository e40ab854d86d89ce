"""Look into one configuration: a trace by torch's profiler or by nsys, a snapshot of the memory.

Megatron records all three itself; here it is asked to, and the trace is summarised.
"""

import shutil
from pathlib import Path

from kaiyuan.errors import UserError
from kaiyuan.files import atomic_write, write_json
from kaiyuan.profiling.grid import Candidate
from kaiyuan.profiling.sweep import Job, measuring_argv, run_ranks
from kaiyuan.profiling.trace import summarize, summary_text

# Steps that are recorded: the first comes after the warm-up.
_FIRST, _LAST = 3, 5


def _argv(candidate: Candidate, job: Job, *more: str) -> list[str]:
    argv = measuring_argv(candidate, job)
    for name, value in (("--train-iters", str(_LAST + 1)), ("--log-interval", "2")):
        argv[argv.index(name) + 1] = value
    return [*argv, *more]


def record_trace(candidate: Candidate, job: Job, ranks: list[int]) -> list[tuple[Path, str]]:
    """Record two steps with torch's profiler, and summarise the trace of each rank.

    Returns:
        Of each rank the trace, in Chrome's format, for ui.perfetto.dev, and its summary as
        Markdown, which is also written beside it.

    Raises:
        UserError: the steps failed.
    """
    folder = job.folder / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    steps = ["--profile-step-start", str(_FIRST), "--profile-step-end", str(_LAST)]
    argv = ["--profile", "--use-pytorch-profiler", *steps]
    argv += ["--profile-ranks", *map(str, ranks)]
    # Megatron writes to torch_profile/ beside this folder.
    argv += ["--tensorboard-dir", str(folder / "tensorboard")]
    _run(_argv(candidate, job, *argv), job, folder / "log.txt")
    traces = []
    for rank in ranks:
        path = folder / "torch_profile" / f"rank-{rank}.json.gz"
        summary = summarize(path)
        text = summary_text(summary)
        write_json(folder / f"rank-{rank}.json", summary.as_json())
        with atomic_write(folder / f"rank-{rank}.md", "w") as stream:
            stream.write(text)
        traces.append((path, text))
    return traces


def record_nsys(candidate: Candidate, job: Job) -> Path:
    """Record the same steps with NVIDIA Nsight Systems.

    Raises:
        UserError: nsys is not installed, or the steps failed.
    """
    if not shutil.which("nsys"):
        raise UserError("nsys is not on the PATH: install NVIDIA Nsight Systems, or use --trace")
    folder = job.folder / "nsys"
    folder.mkdir(parents=True, exist_ok=True)
    prefix = (
        *("nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--force-overwrite=true"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        f"--output={folder / 'steps'}",
    )
    steps = ["--profile-step-start", str(_FIRST), "--profile-step-end", str(_LAST)]
    _run(_argv(candidate, job, "--profile", *steps), job, folder / "log.txt", prefix)
    return folder / "steps.nsys-rep"


def record_memory(candidate: Candidate, job: Job) -> Path:
    """Record what is allocated in the first steps, for pytorch.org/memory_viz.

    Raises:
        UserError: there is no GPU, or the steps failed.
    """
    if job.device.memory is None:
        raise UserError("a memory snapshot is of a GPU's memory, and there is no GPU here")
    folder = job.folder / "memory"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "snapshot.pickle"
    argv = _argv(candidate, job, "--record-memory-history", "--memory-snapshot-path", str(path))
    _run(argv, job, folder / "log.txt")
    return path


def _run(argv: list[str], job: Job, log: Path, prefix: tuple[str, ...] = ()) -> None:
    error = run_ranks(argv, job, log, prefix)
    if error:
        raise UserError(f"{error} (the log is {log})")
