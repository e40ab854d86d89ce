"""Measure configurations, each for a few steps in processes of its own; go on where it stopped.

The result of a configuration is kept in a folder named by its settings and a hash of everything
that it depends on. One that crashes or runs out of memory is a result, too.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from kaiyuan import __version__
from kaiyuan.config import to_argv
from kaiyuan.errors import UserError
from kaiyuan.files import sha256_of_json, write_json
from kaiyuan.profiling.estimate import CONTEXT, Rates, StepTime, memory_table, step_time
from kaiyuan.profiling.grid import Candidate
from kaiyuan.rank import ERROR_MARK
from kaiyuan.train import Nodes, environment_of

RESULT = "result.json"
_OF_A_WHOLE_TRAINING = (
    *("lr_warmup_samples", "lr_decay_samples", "lr_wsd_decay_samples"),
    *("save_interval", "save_retain_interval", "max_loss_jump", "tensorboard_dir"),
    *("wandb_project", "wandb_exp_name", "exit_interval", "exit_duration_in_mins"),
)
# Micro-batches of a step that a promise is checked with; those of the real one may take minutes.
_MOST_IN_CHECK = 32
MEASURED, OUT_OF_MEMORY, FAILED, TOO_LARGE, LEFT_OUT = (
    *("measured", "out of memory", "failed", "does not fit", "left out"),
)


@dataclasses.dataclass(frozen=True)
class Device:
    """The GPUs of this machine: name and bytes of one; "cpu" and None without any."""

    name: str
    memory: int | None

    @classmethod
    def of_this_machine(cls) -> "Device":
        """Ask nvidia-smi."""
        command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
            name, megabytes = answer.stdout.splitlines()[0].rsplit(",", 1)
            return cls(name.strip(), int(megabytes) * 2**20)
        except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
            return cls("cpu", None)


@dataclasses.dataclass(frozen=True)
class Job:
    """How configurations are measured.

    Attributes:
        folder: for everything that is written.
        device: measured on.
        processes: number of all, one a GPU.
        seconds: to measure each, after its warm-up.
        limit: seconds after which one is given up.
        data: folder of a converted phase; random tokens without it.
    """

    folder: Path
    device: Device
    processes: int = 1
    seconds: float = 4.0
    limit: float = 300.0
    data: Path | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of one configuration.

    Attributes:
        candidate: the configuration.
        status: one of the names above.
        measured: what kaiyuan/megatron/measure.py wrote, where it was measured.
        error: one sentence, where it was not.
    """

    candidate: Candidate
    status: str
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""

    @property
    def time(self) -> StepTime:
        """Return the measured times.

        The step's median is split at the median of a micro-batch, so that a step of another number
        of micro-batches can be told.
        """
        step, number = statistics.median(self.measured["steps"]), self.measured["micro_batches"]
        each = self.measured["micro_batch"] or step / number
        return StepTime(each, step - number * each)

    @property
    def step_seconds(self) -> float:
        """Return the seconds of a step of the real global batch."""
        return self.time.step(self.candidate.micro_batches)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens of all GPUs a second, at the real global batch."""
        a = self.candidate.arguments
        return float(a["global_batch_size"] * a["seq_length"] / self.step_seconds)

    @property
    def spread(self) -> float:
        """Return the distance of the slowest from the fastest step, over their median."""
        steps = self.measured["steps"]
        return float((max(steps) - min(steps)) / statistics.median(steps))

    @property
    def peak(self) -> int:
        """Return the most bytes that torch allocated on a rank; 0 without a GPU."""
        return max(each["allocated"] for each in self.measured["memory"])


def estimated_peak(candidate: Candidate) -> int:
    """Return the bytes that a configuration should allocate on its fullest GPU."""
    return sum(memory_table(candidate.arguments, candidate.data_parallel).values())


def estimated_seconds(candidate: Candidate, rates: Rates | None = None) -> float:
    """Return the seconds that a step of the real global batch should take."""
    time = step_time(candidate.arguments, candidate.data_parallel, rates)
    return time.step(candidate.micro_batches)


def choose(
    found: list[Candidate], memory: int | None, at_most: int
) -> tuple[list[Candidate], list[Result]]:
    """Return the configurations to run, fastest first by estimate, and those not to run.

    Args:
        found: all of them.
        memory: of a GPU, in bytes; None where nothing limits it.
        at_most: so many are run.
    """
    run: list[Candidate] = []
    dropped: list[Result] = []
    for each in sorted(found, key=estimated_seconds):
        need = estimated_peak(each)
        if memory is not None and need + CONTEXT > memory:
            reason = f"estimated {need / 2**30:.1f} GiB of {memory / 2**30:.1f}"
            dropped.append(Result(each, TOO_LARGE, error=reason))
        elif len(run) == at_most:
            dropped.append(Result(each, LEFT_OUT, error="slower by the estimate"))
        else:
            run.append(each)
    return run, dropped


def measure(candidate: Candidate, job: Job, check: bool = False) -> Result:
    """Measure one configuration, or take the result that is there already.

    Args:
        candidate: the configuration.
        job: how to measure.
        check: take steps of the real global batch, or of many micro-batches where it has more;
            else of as few as tell their time.
    """
    argv = measuring_argv(candidate, job, check)
    asked = {
        "argv": argv,
        "processes": job.processes,
        "device": job.device.name,
        "version": __version__,
        "check": check,
    }
    folder = job.folder / "runs" / f"{candidate.name}-{sha256_of_json(asked)[:8]}"
    if (folder / RESULT).exists():
        kept = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        return Result(candidate, kept["status"], kept["measured"], kept["error"])
    folder.mkdir(parents=True, exist_ok=True)
    measured = folder / "measured.json"
    measured.unlink(missing_ok=True)
    error = run_ranks([*argv, "--measure-to", str(measured)], job, folder / "log.txt")
    if measured.exists() and not error:
        result = Result(candidate, MEASURED, json.loads(measured.read_text(encoding="utf-8")))
    else:
        status = OUT_OF_MEMORY if "OutOfMemoryError" in error else FAILED
        result = Result(candidate, status, error=error or "nothing was measured")
    body = {"status": result.status, "error": result.error, "measured": result.measured}
    write_json(folder / RESULT, {**body, "settings": candidate.settings, **asked})
    return result


def measuring_argv(candidate: Candidate, job: Job, check: bool = False) -> list[str]:
    """Return Megatron's command line of a configuration, for random tokens or converted data."""
    a = dict(candidate.arguments)
    number = fewest_micro_batches(candidate)
    if check:
        number = min(candidate.micro_batches, max(number, _MOST_IN_CHECK))
    # The schedule has no part in the speed; a small rate keeps random tokens from blowing up.
    a |= {
        "global_batch_size": number * a["micro_batch_size"] * candidate.data_parallel,
        "train_iters": 1000,
        "lr": 1e-5,
        "min_lr": 1e-5,
        "lr_decay_style": "constant",
        **dict.fromkeys(_OF_A_WHOLE_TRAINING),
        "eval_iters": 0,
        "log_interval": 1000,
        "measure_seconds": job.seconds,
        "data_path": str(job.data) if job.data else "random",
    }
    if job.data:
        a["data_cache_path"] = str(job.folder / "cache")
    return to_argv(a)


def fewest_micro_batches(candidate: Candidate) -> int:
    """Return the micro-batches of a step that tell the time of one and of the step's rest.

    Two of them and 16 samples, so that the GPU is about as busy as in a long step; four a stage
    with pipeline parallelism; never more than the real step has.
    """
    a = candidate.arguments
    stages = a.get("pipeline_model_parallel_size", 1)
    number = max(4 * stages if stages > 1 else 2, -(-16 // a["micro_batch_size"]))
    number = -(-number // stages) * stages  # interleaved stages ask for a multiple
    return min(candidate.micro_batches, number)


def run_ranks(argv: list[str], job: Job, log: Path, prefix: tuple[str, ...] = ()) -> str:
    """Run the processes of a training to their end.

    Args:
        argv: Megatron's arguments.
        job: number of processes, and the time that they may take.
        log: file that gets what they print.
        prefix: of the command: a profiler.

    Returns:
        What went wrong, in one sentence; nothing where all went well.
    """
    nodes = Nodes(job.processes)
    command = [*prefix, *nodes.command(), *argv]
    with log.open("w", encoding="utf-8") as out:
        print("$", *command, file=out, flush=True)
        child = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment_of(nodes),
            start_new_session=True,
        )
        try:
            code = child.wait(timeout=job.limit)
        except subprocess.TimeoutExpired:
            return f"not finished after {job.limit:g} seconds"
        finally:  # also after Ctrl-C: what is not finished is no result
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    text = log.read_text(encoding="utf-8", errors="replace")
    told = re.findall(rf"^.*{re.escape(ERROR_MARK)}(.*)$", text, re.MULTILINE)
    if told:
        # Where one rank fails, others fail after it, for want of it.
        memory = [line for line in told if "OutOfMemoryError" in line]
        return str((memory or told)[0]).strip()
    return f"exit code {code}; the log is {log}" if code else ""


def check_promise(result: Result, job: Job) -> dict[str, Any]:
    """Take long steps, of the real global batch if that is not too long, and compare their speed.

    Raises:
        UserError: they could not be measured.
    """
    began = time.monotonic()
    long = measure(result.candidate, job, check=True)
    if long.status != MEASURED:
        raise UserError(f"{result.candidate.name}: {long.error}")
    a, number = result.candidate.arguments, long.measured["micro_batches"]
    samples = number * a["micro_batch_size"] * result.candidate.data_parallel
    promised, measured = result.time.step(number), statistics.median(long.measured["steps"])
    return {
        "configuration": result.candidate.name,
        "samples_a_step": samples,
        "promised_tokens_per_second": samples * a["seq_length"] / promised,
        "measured_tokens_per_second": samples * a["seq_length"] / measured,
        "difference": promised / measured - 1,
        "steps": long.measured["steps"],
        "seconds": time.monotonic() - began,
    }


def promise_text(promise: dict[str, Any]) -> str:
    """Return what `check_promise` found, as a line."""
    return (
        f"{promise['configuration']}, steps of {promise['samples_a_step']} samples: promised "
        f"{promise['promised_tokens_per_second']:,.0f} tokens/s, measured "
        f"{promise['measured_tokens_per_second']:,.0f} ({100 * promise['difference']:+.1f}%)"
    )
