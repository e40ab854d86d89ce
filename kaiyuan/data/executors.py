"""Where units run: in this process, in local processes, or on a Ray cluster. The same bytes."""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal

from kaiyuan.data.inputs import InputFile
from kaiyuan.data.units import Job, Unit, run_unit
from kaiyuan.errors import UserError

ExecutorName = Literal["local", "ray"]


def run_units(
    job: Job, units: Sequence[Unit], files: Sequence[InputFile], workers: int, name: ExecutorName
) -> Iterator[dict[str, Any]]:
    """Run units and yield their records as they finish, in any order.

    Raises:
        UserError: a unit failed, or a worker died.
    """
    if name == "ray":
        yield from _run_on_ray(job, units, files, workers)
    elif workers == 1 or len(units) <= 1:
        yield from (run_unit(job, unit, files[unit.file]) for unit in units)
    else:
        yield from _run_in_processes(job, units, files, workers)


def count_cores(name: ExecutorName) -> int:
    """Return how many cores this process, or the Ray cluster, may use."""
    if name == "local":
        # Not everywhere can a process be bound to cores.
        bound = getattr(os, "sched_getaffinity", None)
        return len(bound(0)) if bound else os.cpu_count() or 1
    return max(1, int(_connect_to_ray().cluster_resources().get("CPU", 1)))


def _connect_to_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise UserError("--executor ray needs Ray: pip install 'kaiyuan[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    return ray


def _run_in_processes(
    job: Job, units: Sequence[Unit], files: Sequence[InputFile], workers: int
) -> Iterator[dict[str, Any]]:
    # spawn, not fork: the encoders' threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(units)), context, _start_worker, (os.getpid(),))
    try:
        futures = [pool.submit(run_unit, job, unit, files[unit.file]) for unit in units]
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed (too little memory?): run the same command again to go "
            "on where it was, with fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(parent: int) -> None:
    # Units are the parallelism; more threads in each would only get in each other's way.
    os.environ["RAYON_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: int) -> None:
    """End this worker soon after its parent was killed, so that none writes into a later run."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _run_on_ray(
    job: Job, units: Sequence[Unit], files: Sequence[InputFile], workers: int
) -> Iterator[dict[str, Any]]:
    ray = _connect_to_ray()
    environment = {"env_vars": {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}
    remote = ray.remote(num_cpus=1, runtime_env=environment)(run_unit)
    waiting = list(reversed(units))
    running: list[Any] = []
    while waiting or running:
        while waiting and len(running) < workers:
            unit = waiting.pop()
            running.append(remote.remote(job, unit, files[unit.file]))
        done, running = ray.wait(running)
        try:
            yield ray.get(done[0])
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, UserError) else error from None
