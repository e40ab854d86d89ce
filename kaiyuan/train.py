"""Run the phases of a training one after another, each as far as it is not done yet.

Each phase is a run of Megatron of its own (its ``--phase-transition-iterations``): it begins from
the last checkpoint, reads its own data from its own beginning, and ends with a checkpoint. Going
on after an interruption is the same thing, begun in the middle of a phase.
"""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from rich.console import Console

from kaiyuan.config import Params
from kaiyuan.errors import UserError
from kaiyuan.live import TrainingView
from kaiyuan.plan import PhasePlan, Plan
from kaiyuan.plan_summary import batch_layout
from kaiyuan.rank import ERROR_MARK, MARK, STEP_MARK
from kaiyuan.runfolder import CHECKPOINTS, latest_step, lock, settle_checkpoints, while_recorded

# The exit code of a training that a signal stopped and that saved: the same command goes on.
STOPPED = 75  # EX_TEMPFAIL of sysexits.h
_KILLED = re.compile(r"Signal \d+ \((SIG\w+)\) received by PID")


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The processes of a training.

    Attributes:
        processes: number on this machine, one a GPU.
        nodes: number of machines.
        rank: of this machine, from 0.
        address: host and port of the first machine, where there are several.

    Raises:
        UserError: the machines could not meet by these.
    """

    processes: int = 1
    nodes: int = 1
    rank: int = 0
    address: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.nodes:
            raise UserError(
                f"--node-rank counts machines from 0: it must be below --nnodes ({self.nodes}), "
                f"not {self.rank}"
            )
        if self.nodes > 1:
            host, _, port = self.address.rpartition(":")
            if not (host and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
                raise UserError(
                    "several machines meet at the first one: its HOST:PORT must be given with "
                    f"--master, not {self.address!r}"
                )

    def command(self) -> list[str]:
        """Return the command that starts the processes of this machine."""
        if self.processes * self.nodes == 1:
            return [sys.executable, "-m", "kaiyuan.rank"]
        host, _, port = self.address.rpartition(":")
        meeting = (
            # its own default is the machine's name, which need not resolve
            ["--standalone", "--local-addr=127.0.0.1"]
            if self.nodes == 1
            else [f"--master-addr={host}", f"--master-port={port}", f"--node-rank={self.rank}"]
        )
        counts = [f"--nnodes={self.nodes}", f"--nproc-per-node={self.processes}"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", *counts, *meeting]
        return [*torchrun, "-m", "kaiyuan.rank"]


def check_layout(params: Params, nodes: Nodes) -> None:
    """Raise a UserError where the batch does not divide among the processes."""
    for phase in params.phases:
        batch_layout(params.arguments(phase), nodes.processes * nodes.nodes)


def train(
    plan: Plan,
    data: Path,
    run: Path,
    nodes: Nodes | None = None,
    tokenizer: Path | None = None,
    only: str | None = None,
    console: Console | None = None,
    allow_change: bool = False,
) -> bool:
    """Train all phases that are not done, or one of them.

    Args:
        plan: made from the same data; see `kaiyuan.preflight` for what should be checked first.
        data: folder with the converted phases.
        run: folder of the run; made where it is missing, gone on with where it is not.
        nodes: the processes to train with.
        tokenizer: noted in the run for those that export it.
        only: name of the single phase to train.
        console: gets the progress.
        allow_change: go on with a run although its plan is another now.

    Returns:
        Whether the training reached its end; False where a signal stopped it after saving.

    Raises:
        UserError: the run was begun with other arguments or other data, another process trains
            it, or Megatron refuses the arguments or fails.
    """
    nodes = nodes or Nodes()
    console = console or Console()
    check_layout(plan.params, nodes)
    chosen = chosen_phases(plan, only)
    for phase in chosen:
        if phase.data is None:
            raise UserError(f"{data / phase.name} is not converted yet: run kaiyuan convert first")
    say = partial(console.print, highlight=False)
    with lock(run, nodes.rank, say) as handle, contextlib.ExitStack() as stack:
        if nodes.rank == 0:
            for sentence in settle_checkpoints(run):
                say(sentence)
            stack.enter_context(while_recorded(plan, run, tokenizer, allow_change))
        for phase in chosen:
            done = _steps_done(run, nodes)
            if done >= phase.last_step:
                say(f"{phase.name}: done ({phase.last_step} steps)")
                continue
            if done < phase.first_step:
                raise UserError(
                    f"{phase.name} begins at step {phase.first_step}, but the run has only done "
                    f"{done}: train the phases before it first"
                )
            say(f"{phase.name}: steps {done + 1} to {phase.last_step} of {plan.steps}")
            stopped = _run_phase(phase, plan.steps, data, run, nodes, handle, console)
            step = latest_step(run)
            if step < phase.last_step or (stopped and phase is not chosen[-1]):
                say(f"stopped and saved at step {step}")
                return False
    return True


def _steps_done(run: Path, nodes: Nodes) -> int:
    """Return the run's steps; machine 0 may be mending its tracker while the others read it."""
    for _ in range(20 if nodes.rank else 0):
        with contextlib.suppress(UserError):
            return latest_step(run)
        time.sleep(0.5)
    return latest_step(run)


def phase_arguments(phase: PhasePlan, data: Path, run: Path) -> list[str]:
    """Return the full command line of a phase for kaiyuan/rank.py."""
    checkpoints = str(run / CHECKPOINTS)
    argv = [*phase.argv, "--data-path", str(data / phase.name)]
    argv += ["--save", checkpoints, "--load", checkpoints]
    if phase.first_step:
        argv.append("--exit-on-missing-checkpoint")
    argv += ["--record-to", str(run / "loss.csv")]
    defaults: dict[str, Path | str] = {
        "--data-cache-path": run / "cache",
        "--tensorboard-dir": run / "tensorboard",
    }
    if "--wandb-project" in argv:
        # Megatron asks for a name, and would write among the checkpoints.
        defaults |= {"--wandb-exp-name": run.resolve().name, "--wandb-save-dir": run}
    for name, value in defaults.items():
        if name not in argv:
            argv += [name, str(value)]
    return argv


def chosen_phases(plan: Plan, only: str | None) -> Sequence[PhasePlan]:
    """Return all phases, or the one of a name; a UserError where there is none."""
    if only is None:
        return plan.phases
    chosen = [phase for phase in plan.phases if phase.name == only]
    if not chosen:
        raise UserError(
            f"there is no phase {only!r}; there are {', '.join(p.name for p in plan.phases)}"
        )
    return chosen


def _run_phase(
    phase: PhasePlan,
    steps: int,
    data: Path,
    run: Path,
    nodes: Nodes,
    lock_handle: int,
    console: Console,
) -> bool:
    """Run the processes of a phase to their end; return whether a signal stopped them."""
    environment = environment_of(nodes)
    # The last rank of all tells of the steps.
    last = nodes.rank == nodes.nodes - 1
    command = [*nodes.command(), *phase_arguments(phase, data, run)]
    heard = _Heard()
    with _Log(run / "logs" / f"{phase.name}-node{nodes.rank}.log") as log:
        log.write(" ".join(["$", *command]) + "\n")
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
            pass_fds=[lock_handle],
            start_new_session=True,  # Ctrl-C reaches it as the signal that saves
            preexec_fn=_ignore_sigterm if nodes.processes * nodes.nodes > 1 else None,
        )
        with (
            _signals_to(child, nodes) as signals,
            TrainingView(phase, steps, console, signals, latest_step(run), live=last) as view,
        ):
            # Not until the pipe is closed: what a killed rank had started may hold it open.
            reader = threading.Thread(target=_show, args=(child, log, view, heard), daemon=True)
            reader.start()
            code = child.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            reader.join(timeout=5)
    failure = failure_of(phase.name, code, bool(signals), latest_step(run), heard, log)
    if failure:
        raise UserError(failure)
    if log.problem:
        console.print(f"{log.path} could not be written: {log.problem}", highlight=False)
    return bool(signals)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class _Log:
    """A log that a full disk cuts short, instead of the training.

    Attributes:
        path: of the file.
        problem: why a line could not be written, from which on none is; empty while all can.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self.path, self.problem = path, ""
        # Without a buffer, so that closing has nothing left to write.
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, text: str) -> None:
        if self.problem or self._file.closed:
            return
        try:
            self._file.write(text.encode("utf-8"))
        except OSError as error:
            self.problem = str(error.strerror)


@dataclasses.dataclass
class _Heard:
    """What the processes said that the launcher needs.

    Attributes:
        errors: sentences for the user.
        killed_by: name of the signal that ended a rank, by torchrun's own report.
        step: the last that was done, 0 before the first.
    """

    errors: list[str] = dataclasses.field(default_factory=list)
    killed_by: str = ""
    step: int = 0


def failure_of(
    phase: str, code: int, asked: bool, saved: int, heard: _Heard, log: _Log
) -> str | None:
    """Return what went wrong with the processes of a phase, or None where nothing did.

    Args:
        phase: its name.
        code: exit code, or minus the number of the signal that ended them.
        asked: whether a signal to the launcher asked them to end.
        saved: step of the last checkpoint.
        heard: what they said.
        log: of them.
    """
    # While the processes start, and after the last save, there is nothing to lose. But only one
    # machine hears of steps; on the others an error may be of the save.
    safe = heard.step <= saved and (heard.step or not heard.errors)
    if code == 0 or (asked and safe):
        return None
    where = f"the log is {log.path}, and the same command goes on from step {saved}"
    killed = heard.killed_by or (_signal_name(-code) if code < 0 else "")
    # Before the errors: when a rank is killed, the others complain of a lost connection. But by
    # SIGTERM torchrun itself ends the others, when one has failed.
    if killed and not asked and not (killed == "SIGTERM" and heard.errors):
        return f"{phase} was killed by {killed}; {where}"
    if log.problem:
        return (
            f"{log.path} could not be written ({log.problem}), most likely because the disk is "
            f"full: make room, and the same command goes on from step {saved}"
        )
    if heard.errors:
        return f"{heard.errors[0]} (the log is {log.path})"
    if asked:
        return (
            f"{phase} was stopped before it could save; the last checkpoint is of step {saved}, "
            "and the same command goes on from there"
        )
    return f"{phase} failed with exit code {code}; {where}"


def _show(child: subprocess.Popen[str], log: _Log, view: TrainingView, heard: _Heard) -> None:
    """Copy what the processes print to the log, and what is meant for people to the console."""
    assert child.stdout is not None
    for line in child.stdout:
        # The steps stand in loss.csv, and in Megatron's own words in the log.
        if line.startswith(STEP_MARK) and view.update(line.removeprefix(STEP_MARK)):
            heard.step = view.step
            continue
        log.write(line)
        if line.startswith(ERROR_MARK):
            heard.errors.append(line.removeprefix(ERROR_MARK).strip())
        elif line.startswith(MARK):
            view.console.print(" ", line.removeprefix(MARK).rstrip(), highlight=False)
        elif killed := _KILLED.search(line):
            heard.killed_by = heard.killed_by or killed[1]


def _ignore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def environment_of(nodes: Nodes) -> dict[str, str]:
    """Return the environment of the processes."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # W&B is used where wandb_project is given, and then sends nothing unless asked to.
    environment.setdefault("WANDB_MODE", "offline")
    # Torchrun kills its ranks 30 seconds after a SIGTERM, which Slurm sends to all processes; a
    # save takes longer. The ranks end by themselves, and torchrun after them.
    for name in ("PET_SIGNALS_TO_HANDLE", "TORCHELASTIC_SIGNALS_TO_HANDLE"):
        environment[name] = "SIGQUIT"
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
def _signals_to(child: subprocess.Popen[str], nodes: Nodes) -> Iterator[list[int]]:
    """Pass Ctrl-C and SIGTERM on as SIGTERM, at which Megatron saves and ends; kill at a second.

    Yields:
        The signals that came.
    """
    came: list[int] = []

    def forward(number: int, _: object) -> None:
        came.append(number)
        sent = signal.SIGTERM if len(came) == 1 else signal.SIGKILL
        # The ranks themselves; torchrun ignores it, see environment_of.
        ranks = _children(child.pid) if nodes.processes * nodes.nodes > 1 else []
        for process in ranks or [child.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, sent)

    before = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children(process: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{process}/task").iterdir()
        return [int(n) for task in tasks for n in (task / "children").read_text().split()]
    return []
