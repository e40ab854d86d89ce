"""Where units run: in this process, in local processes, or on a Ray cluster. The same bytes."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal, Protocol

from kaiyuan.data.inputs import InputFile
from kaiyuan.data.tokenizer import EncoderName, SpecialText, load_encoder
from kaiyuan.data.units import Job, Unit, run_unit
from kaiyuan.errors import UserError
from kaiyuan.files import sha256_of
from kaiyuan.processes import end_with

ExecutorName = Literal["local", "ray"]
_WORTH_A_PROCESS = 16 << 20  # bytes of text; below, starting a process takes longer than the work


class UnitExecutor(Protocol):
    """Runs units.

    Attributes:
        pool: processes that have the encoder loaded, or soon will; None where there are none.
    """

    pool: Executor | None

    def start(
        self, tokenizer: Path, encoder: EncoderName, special_text: SpecialText, text_bytes: int
    ) -> None:
        """Get ready for so much text, while what remains to be checked is checked."""

    def run(
        self, job: Job, units: Sequence[Unit], files: Sequence[InputFile]
    ) -> Iterator[dict[str, Any]]:
        """Run units and yield their records as they finish, in any order.

        Raises:
            UserError: a unit failed.
        """
        ...

    def stop(self, at_once: bool) -> None:
        """End the processes, after the units that they are at, or at once."""


@contextlib.contextmanager
def unit_executor(name: ExecutorName, workers: int | None = None) -> Iterator[UnitExecutor]:
    """Provide an executor of ``workers`` units at a time; None for one a core.

    Raises:
        UserError: Ray is wanted and missing; a process was killed while the executor was in use.
    """
    executor = LocalExecutor(workers) if name == "local" else RayExecutor(workers)
    interrupted = False
    try:
        yield executor
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed (too little memory?): run the same command again to go "
            "on where it was, with fewer --workers"
        ) from None
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        executor.stop(at_once=interrupted)


class LocalExecutor:
    """Processes of this machine, or this process alone where there is little to do."""

    def __init__(self, workers: int | None) -> None:
        self.workers = workers or _count_cores()
        self.pool: Executor | None = None
        self._others: set[Any] = set()

    def start(
        self, tokenizer: Path, encoder: EncoderName, special_text: SpecialText, text_bytes: int
    ) -> None:
        """See `UnitExecutor`."""
        workers = min(self.workers, 1 + text_bytes // _WORTH_A_PROCESS)
        path = tokenizer / "tokenizer.json"
        if workers == 1 or not path.is_file():
            return
        # spawn, not fork: the encoders' threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        load = (tokenizer.absolute(), sha256_of(path), encoder, special_text)
        self._others = set(multiprocessing.active_children())
        self.pool = ProcessPoolExecutor(workers, context, _start_worker, (os.getpid(), *load))
        # Ctrl-C reaches all processes of a terminal, but is for this one, which ends the others:
        # they inherit the mask, and so are not interrupted in their imports.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(workers):  # each starts a process
                self.pool.submit(os.getpid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def run(
        self, job: Job, units: Sequence[Unit], files: Sequence[InputFile]
    ) -> Iterator[dict[str, Any]]:
        """See `UnitExecutor`."""
        if self.pool is None:
            yield from (run_unit(job, unit, files[unit.file]) for unit in units)
            return
        futures = [self.pool.submit(run_unit, job, unit, files[unit.file]) for unit in units]
        for future in as_completed(futures):
            yield future.result()

    def stop(self, at_once: bool) -> None:
        """See `UnitExecutor`."""
        if self.pool is not None:
            if at_once:
                for process in set(multiprocessing.active_children()) - self._others:
                    process.terminate()
            self.pool.shutdown(wait=True, cancel_futures=True)


def _count_cores() -> int:
    # Not everywhere can a process be bound to cores.
    bound = getattr(os, "sched_getaffinity", None)
    return len(bound(0)) if bound else os.cpu_count() or 1


def _start_worker(
    parent: int, folder: Path, json_sha256: str, encoder: EncoderName, special_text: SpecialText
) -> None:
    # Units are the parallelism; more threads in each would only get in each other's way.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with(parent)  # so that none writes into a later run
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What is wrong with a tokenizer is found, and said, by the one that checks it.
    with contextlib.suppress(Exception):
        load_encoder(folder, json_sha256, encoder, special_text)


class RayExecutor:
    """The workers of a Ray cluster."""

    pool: Executor | None = None

    def __init__(self, workers: int | None) -> None:
        try:
            import ray
        except ImportError:
            raise UserError("--executor ray needs Ray: pip install 'kaiyuan[ray]'") from None
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        self._ray = ray
        self.workers = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def start(
        self, tokenizer: Path, encoder: EncoderName, special_text: SpecialText, text_bytes: int
    ) -> None:
        """See `UnitExecutor`; each worker loads the encoder with its first unit."""

    def run(
        self, job: Job, units: Sequence[Unit], files: Sequence[InputFile]
    ) -> Iterator[dict[str, Any]]:
        """See `UnitExecutor`."""
        ray = self._ray
        environment = {"env_vars": {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}
        remote = ray.remote(num_cpus=1, runtime_env=environment)(run_unit)
        waiting = list(reversed(units))
        running: list[Any] = []
        while waiting or running:
            while waiting and len(running) < self.workers:
                unit = waiting.pop()
                running.append(remote.remote(job, unit, files[unit.file]))
            done, running = ray.wait(running)
            try:
                yield ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, UserError) else error from None

    def stop(self, at_once: bool) -> None:
        """See `UnitExecutor`; the cluster stays."""
