"""Run the phases of a training one after another, each as far as it is not done yet.

Each phase is a run of Megatron of its own (its ``--phase-transition-iterations``): it begins from
the last checkpoint, reads its own data from its own beginning, and ends with a checkpoint. Going
on after an interruption is the same thing, begun in the middle of a phase.
"""

import contextlib
import dataclasses
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kaiyuan import __version__
from kaiyuan.errors import UserError
from kaiyuan.files import read_manifest, sha256_of_json, write_manifest
from kaiyuan.plan import PhasePlan, Plan
from kaiyuan.plan_summary import batch_layout
from kaiyuan.rank import ERROR_MARK, MARK

# A run is described before it is complete; what is complete has a manifest.json.
RUN_FILE = "run.json"

# Arguments that say how the work is laid out and reported, not what is computed; these alone may
# change when a run goes on.
_LAYOUT = {
    "micro_batch_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "sequence_parallel",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "transformer_impl",
    "num_workers",
    "exit_interval",
    "exit_duration_in_mins",
    "save_interval",
    "log_interval",
    "log_throughput",
    "tensorboard_dir",
}


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The processes of a training.

    Attributes:
        processes: number on this machine, one a GPU.
        nodes: number of machines.
        rank: of this machine, from 0.
        address: host and port of the first machine, where there are several.
    """

    processes: int = 1
    nodes: int = 1
    rank: int = 0
    address: str = ""

    def command(self) -> list[str]:
        """Return the command that starts the processes of this machine."""
        if self.processes * self.nodes == 1:
            return [sys.executable, "-m", "kaiyuan.rank"]
        host, _, port = self.address.rpartition(":")
        meeting = (
            ["--standalone"]
            if self.nodes == 1
            else [f"--master-addr={host}", f"--master-port={port}", f"--node-rank={self.rank}"]
        )
        counts = [f"--nnodes={self.nodes}", f"--nproc-per-node={self.processes}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *counts, *meeting]
        return [*torchrun, "-m", "kaiyuan.rank"]


def check_layout(plan: Plan, nodes: Nodes) -> None:
    """Raise a UserError where the batch does not divide among the processes."""
    for phase in plan.phases:
        batch_layout(phase.arguments, nodes.processes * nodes.nodes)


def latest_step(run: Path) -> int:
    """Return the step of the last complete checkpoint of a run, 0 where there is none."""
    tracker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    try:
        text = tracker.read_text()
    except FileNotFoundError:
        return 0
    if not text.strip().isdigit():
        raise UserError(f"{tracker} should hold a number, not {text.strip()!r}")
    return int(text)


def train(
    plan: Plan,
    data: Path,
    run: Path,
    nodes: Nodes | None = None,
    tokenizer: Path | None = None,
    only: str | None = None,
    console: Console | None = None,
) -> bool:
    """Train all phases that are not done, or one of them.

    Args:
        plan: made from the same data.
        data: folder with the converted phases.
        run: folder of the run; made where it is missing, gone on with where it is not.
        nodes: the processes to train with.
        tokenizer: noted in the run for those that export it.
        only: name of the single phase to train.
        console: gets the progress.

    Returns:
        Whether the training reached its end; False where a signal stopped it after saving.

    Raises:
        UserError: the run was begun with other arguments or other data, another process trains
            it, or Megatron refuses the arguments or fails.
    """
    nodes = nodes or Nodes()
    console = console or Console()
    check_layout(plan, nodes)
    for phase in plan.phases:
        if phase.data is None:
            raise UserError(f"{data / phase.name} is not converted yet: run kaiyuan convert first")
    with _lock(run, nodes.rank) as lock:
        if nodes.rank == 0:
            _describe(plan, run, tokenizer)
        for phase in _chosen(plan, only):
            done = latest_step(run)
            if done >= phase.last_step:
                console.print(f"{phase.name}: done ({phase.last_step} steps)", highlight=False)
                continue
            if done < phase.first_step:
                raise UserError(
                    f"{phase.name} begins at step {phase.first_step}, but the run has only done "
                    f"{done}: train the phases before it first"
                )
            console.print(
                f"{phase.name}: steps {done + 1} to {phase.last_step} of {plan.steps}",
                highlight=False,
            )
            _run_phase(phase, data, run, nodes, lock, console)
            if latest_step(run) < phase.last_step:
                console.print(f"stopped and saved at step {latest_step(run)}", highlight=False)
                return False
    return True


def phase_arguments(phase: PhasePlan, data: Path, run: Path) -> list[str]:
    """Return the full command line of a phase for kaiyuan/rank.py."""
    checkpoints = str(run / "checkpoints")
    argv = [*phase.argv, "--data-path", str(data / phase.name)]
    argv += ["--save", checkpoints, "--load", checkpoints]
    if phase.first_step:
        argv.append("--exit-on-missing-checkpoint")
    argv += ["--record-to", str(run / "loss.csv")]
    if "--tensorboard-dir" not in argv:
        argv += ["--tensorboard-dir", str(run / "tensorboard")]
    return argv


def _chosen(plan: Plan, only: str | None) -> Sequence[PhasePlan]:
    if only is None:
        return plan.phases
    chosen = [phase for phase in plan.phases if phase.name == only]
    if not chosen:
        raise UserError(
            f"there is no phase {only!r}; there are {', '.join(p.name for p in plan.phases)}"
        )
    return chosen


@contextlib.contextmanager
def _lock(run: Path, node: int) -> Iterator[int]:
    """Hold the run for this process and those that it starts, which inherit the lock."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        handle = os.open(run / f".lock-{node}", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"cannot write to {run}: {error.strerror}") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield handle
    except BlockingIOError:
        raise UserError(f"another process is training {run}") from None
    finally:
        os.close(handle)


def _describe(plan: Plan, run: Path, tokenizer: Path | None) -> None:
    """Write run.json, or hold the plan against the one that is there."""
    tokenizers = {phase.data.manifest["tokenizer"]["hash"] for phase in plan.phases if phase.data}
    ends = {phase.data.eod for phase in plan.phases if phase.data}
    if len(tokenizers) > 1 or len(ends) > 1:
        raise UserError("the phases were converted with different tokenizers: convert them again")
    phases = [
        {
            "name": phase.name,
            "content_hash": phase.data.content_hash,
            "documents": phase.data.num_documents,
            "tokens": phase.tokens,
            "samples": phase.samples,
            "steps": phase.steps,
            "arguments": {k: v for k, v in phase.arguments.items() if k not in _LAYOUT},
        }
        for phase in plan.phases
        if phase.data
    ]
    if latest_step(run):
        begun = read_manifest(run, "run", RUN_FILE)
        change = _first_difference(begun["phases"], phases)
        if change:
            raise UserError(
                f"{run} was begun with another plan: {change}; give the old value, or another "
                "folder with --output"
            )
    body = {
        "name": plan.params.name,
        "version": __version__,
        "model": plan.params.model,
        "vocab_size": plan.params.model["vocab_size"],
        "tokenizer": str(tokenizer.absolute()) if tokenizer else None,
        "tokenizer_hash": tokenizers.pop(),
        "end_of_document_id": ends.pop(),
        "phases": phases,
    }
    write_manifest(run, "run", body, RUN_FILE)


def _first_difference(old: Any, new: Any, where: str = "") -> str | None:
    """Return where two JSON values differ, with both values, or None."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            change = _first_difference(old.get(key), new.get(key), f"{where} {key}")
            if change:
                return change
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            name = a.get("name", i) if isinstance(a, dict) else i
            change = _first_difference(a, b, f"{where} {name}")
            if change:
                return change
        return None
    if sha256_of_json(old) == sha256_of_json(new):
        return None
    return f"{where.strip()} was {old!r} and is now {new!r}"


def _run_phase(
    phase: PhasePlan, data: Path, run: Path, nodes: Nodes, lock: int, console: Console
) -> None:
    log = run / "logs" / f"{phase.name}-node{nodes.rank}.log"
    log.parent.mkdir(exist_ok=True)
    environment = _environment(nodes)
    command = [*nodes.command(), *phase_arguments(phase, data, run)]
    error = None
    with log.open("a", encoding="utf-8") as out:
        print("$", *command, file=out, flush=True)
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            pass_fds=[lock],
            start_new_session=True,  # Ctrl-C reaches it as the signal that saves
        )
        with _signals_to(child) as signals:
            assert child.stdout is not None
            for line in child.stdout:
                out.write(line)
                out.flush()
                if line.startswith(ERROR_MARK):
                    error = error or line.removeprefix(ERROR_MARK).strip()
                elif line.startswith(MARK):
                    console.print(" ", line.removeprefix(MARK).rstrip(), highlight=False)
            code = child.wait()
    if error:
        raise UserError(error)
    # torchrun does not end with 0 after a signal, even if all ranks saved and did.
    if code and not signals:
        raise UserError(f"{phase.name} failed with exit code {code}; the log is {log}")


def _environment(nodes: Nodes) -> dict[str, str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    threads = max(1, (os.cpu_count() or 1) // nodes.processes)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    if nodes.processes * nodes.nodes == 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _signals_to(child: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Pass Ctrl-C and SIGTERM on as SIGTERM, at which Megatron saves and ends.

    Yields:
        The signals that came.
    """
    came: list[int] = []

    def forward(number: int, _: object) -> None:
        came.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)

    before = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
