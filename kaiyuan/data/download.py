"""Download phases of the pre-training data, so that what lies here is what the hub published.

A run lists the phases at one revision, sees what is here already, checks the disk, brings the rest
and writes a manifest into each finished phase. Killed at any moment, the next run goes on.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kaiyuan.data import fetch
from kaiyuan.data.connection import (
    HUGGING_FACE,
    MODELSCOPE,
    Connection,
    Endpoint,
    Stopped,
    token_from_environment,
)
from kaiyuan.data.hub import Hub, HuggingFaceHub, ModelScopeHub
from kaiyuan.data.phases import LocalFile, check_inside, files_of_phases
from kaiyuan.errors import UserError
from kaiyuan.files import MANIFEST, check_writable, nearest, read_manifest, write_manifest
from kaiyuan.progress import ByteProgress, counted, human_bytes

REPO = "thu-pacman/PCMind-2.1-Kaiyuan-2B"
KIND = "download"
_WORK = ".kaiyuan-download"  # folder below the destination for parts, the record and the lock
_RESERVE = 1 << 30  # bytes of disk that are left alone


@dataclass(frozen=True)
class Job:
    """What to download.

    Attributes:
        phases: numbers from 1 to 5.
        dest: folder that gets phase1 ... phase5.
        source: "hf" or "modelscope".
        endpoint: address of the hub; None for that of the environment or the public one.
        revision: commit, branch or tag; None for the newest.
        repo: owner/name of the dataset.
        more_hosts: hosts beside the endpoint that may be contacted.
        workers: files at a time.
        recheck: read and hash also the files that an earlier run proved.
        pause: seconds before the first retry.
    """

    phases: list[int]
    dest: Path
    source: str = "hf"
    endpoint: str | None = None
    revision: str | None = None
    repo: str = REPO
    more_hosts: tuple[str, ...] = ()
    workers: int = 8
    recheck: bool = False
    pause: float = 1.0


@dataclass(frozen=True)
class Plan:
    """What a job comes to: the files, and which of them are wanting.

    Attributes:
        revision: as exact as the hub can tell it.
        files: all files of the phases.
        missing: those to bring.
        unproved: those that are here with the right size, to be hashed.
        bytes_here: bytes of the missing files that lie in part files.
        free: bytes on the destination's disk.
    """

    revision: str
    files: list[LocalFile]
    missing: list[LocalFile]
    unproved: list[LocalFile]
    bytes_here: int
    free: int

    @property
    def bytes_wanted(self) -> int:
        """Bytes that are still to come."""
        return sum(file.remote.size for file in self.missing) - self.bytes_here


@dataclass
class Summary:
    """What was done, for the last line."""

    plan: Plan
    hosts: list[str] = field(default_factory=list)
    fetched: int = 0


class Record:
    """The files that were proved, with the size and time they had then: one JSON line each.

    A line is written after its file is in place. One that is lost, torn or outdated only means
    that the file is hashed again.
    """

    def __init__(self, dest: Path) -> None:
        self.dest = dest
        self.path = dest / _WORK / "proved.jsonl"
        self.known: dict[str, list[Any]] = {}
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    self.known[entry["path"]] = entry["state"]

    def _state(self, file: LocalFile) -> list[Any]:
        stat = (self.dest / file.path).stat()
        return [file.remote.digest, stat.st_size, stat.st_mtime_ns]

    def has(self, file: LocalFile) -> bool:
        """Whether the file is untouched since it was proved to be this very content."""
        return self.known.get(str(file.path)) == self._state(file)

    def add(self, file: LocalFile) -> None:
        """Note that the file is here and proved; threads may call this at the same time."""
        line = json.dumps({"path": str(file.path), "state": self._state(file)})
        # A newline in front closes a line that a killed run left torn.
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(f"\n{line}\n")


def connect(job: Job) -> tuple[Connection, Hub]:
    """Check a job, make its connection and the hub at its other end; sends nothing yet."""
    if job.source not in ("hf", "modelscope"):
        raise UserError(f"--source is hf or modelscope, not {job.source!r}")
    if not re.fullmatch(r"[^/\s]+/[^/\s]+", job.repo):
        raise UserError(f"a repository is called like owner/name, not {job.repo!r}")
    for host in job.more_hosts:
        if "/" in host or host.count(":") == 1:  # an IPv6 address has more colons
            raise UserError(f"--allow-host takes a host such as cdn.example.com, not {host!r}")
    _check_dest(job.dest)
    if job.source == "hf":
        url = job.endpoint or os.environ.get("HF_ENDPOINT") or HUGGING_FACE
    else:
        url = job.endpoint or os.environ.get("MODELSCOPE_ENDPOINT") or MODELSCOPE
    endpoint = Endpoint(url, token_from_environment(job.source), job.more_hosts)
    connection = Connection(endpoint, job.pause)
    hub = HuggingFaceHub if job.source == "hf" else ModelScopeHub
    return connection, hub(connection, job.repo)


def make_plan(job: Job, hub: Hub) -> Plan:
    """List the phases and compare them with what is here; changes nothing."""
    revision = hub.resolve(job.revision)
    files = files_of_phases(hub.list_files(revision), job.phases)
    record = Record(job.dest)
    missing, unproved, here = [], [], 0
    for file in files:
        path = check_inside(job.dest, file.path)
        if path.is_file() and path.stat().st_size == file.remote.size:
            if job.recheck or not record.has(file):
                unproved.append(file)
            continue
        missing.append(file)
        part = job.dest / _WORK / fetch.part_name(file.remote)
        here += part.stat().st_size if part.is_file() else 0
    _refuse_strangers(job, files)
    return Plan(revision, files, missing, unproved, here, _free_bytes(job.dest))


def _refuse_strangers(job: Job, files: list[LocalFile]) -> None:
    """Parquet files that the revision does not have would be trained on unnoticed."""
    wanted = {job.dest / file.path for file in files}
    for phase in job.phases:
        strangers = sorted(set((job.dest / f"phase{phase}").rglob("*.parquet")) - wanted)
        if strangers:
            raise UserError(
                f"{counted(len(strangers), 'parquet file')} in {job.dest}/phase{phase} not of this "
                f"revision, such as {strangers[0].name}: move away or use another --dest"
            )


def _check_dest(dest: Path) -> None:
    """Find what is wrong with the destination before the hub is asked; leaves nothing there."""
    existing = nearest(dest)
    if not existing.is_dir():
        raise UserError(f"{existing} is no folder: take another --dest")
    if not (dest / _WORK).is_dir():  # of an earlier run all may be here, and nothing to write
        check_writable(dest)


def _free_bytes(dest: Path) -> int:
    return shutil.disk_usage(nearest(dest)).free


def check_disk(plan: Plan, dest: Path) -> None:
    """Raise UserError if what is to come does not fit on the disk."""
    if plan.bytes_wanted + _RESERVE > plan.free and plan.missing:
        raise UserError(
            f"{human_bytes(plan.bytes_wanted)} are to come and {dest} has "
            f"{human_bytes(plan.free)} free, of which 1 GB is left alone: "
            "take fewer phases or a larger disk"
        )


def download(job: Job) -> Summary:
    """Bring the phases of a job here.

    Raises:
        UserError: the hub, the disk or a file stands in the way; what was brought stays, and the
            next run goes on from there.
    """
    connection, hub = connect(job)
    plan = make_plan(job, hub)
    check_disk(plan, job.dest)
    summary = Summary(plan)
    if plan.missing or plan.unproved or not _is_signed(job, plan):
        with _locked(job.dest):
            summary.fetched = _bring(job, plan, connection, hub)
            _sign(job, plan)
    summary.hosts = sorted(connection.hosts)
    return summary


@contextlib.contextmanager
def _locked(dest: Path) -> Iterator[None]:
    """Keep a second run out; the lock ends with the process, however that ends."""
    try:
        (dest / _WORK).mkdir(parents=True, exist_ok=True)
        stream = (dest / _WORK / "lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write to {dest}: {error.strerror}") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another download into {dest} is running") from None
        yield


def _bring(job: Job, plan: Plan, connection: Connection, hub: Hub) -> int:
    """Prove what is unproved and fetch what is missing; return the number of files fetched."""
    record = Record(job.dest)
    for phase in {file.phase for file in plan.missing + plan.unproved}:
        (job.dest / f"phase{phase}" / MANIFEST).unlink(missing_ok=True)
    total = sum(file.remote.size for file in plan.missing)
    with ByteProgress("download", total, plan.bytes_here) as progress:

        def ensure(file: LocalFile) -> bool:
            path = job.dest / file.path
            if path.is_file() and fetch.matches(path, file.remote):
                fetch.parquet_rows(path)
                record.add(file)
                return False
            if connection.stop.is_set():
                raise Stopped
            path.parent.mkdir(parents=True, exist_ok=True)
            part = job.dest / _WORK / fetch.part_name(file.remote)
            address = hub.request(file.remote.path, plan.revision)
            fetch.fetch(connection, file.remote, address, part, progress.advance)
            fetch.parquet_rows(part)
            fetch.finish(part, path)
            record.add(file)
            return True

        return _in_threads(job.workers, connection, plan.unproved + plan.missing, ensure)


def _in_threads(workers: int, connection: Connection, files: list[LocalFile], ensure: Any) -> int:
    """Run ``ensure`` on all files; the first error other than a file's own stops the others."""
    faults: list[str] = []

    def guarded(file: LocalFile) -> bool:
        try:
            return bool(ensure(file))
        except fetch.FileFault as fault:
            faults.append(f"{file.remote.path} {fault}")
            return False
        except OSError as error:
            raise UserError(f"cannot write {file.path}: {error.strerror}") from error

    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(guarded, file) for file in files]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            unfinished = any(not future.done() for future in futures)
            if unfinished:
                connection.stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
    errors = [future.exception() for future in done]
    for error in errors:
        if error is not None and not isinstance(error, Stopped):
            raise error
    if faults:
        more = f" (and {len(faults) - 1} more files with faults)" if len(faults) > 1 else ""
        raise UserError(f"{sorted(faults)[0]}{more}; the others are here")
    return sum(future.result() for future in done)


def _body(job: Job, plan: Plan, phase: int) -> dict[str, Any]:
    files = [file for file in plan.files if file.phase == phase]
    return {
        "repo": job.repo,
        "source": job.source,
        "revision": plan.revision,
        "phase": phase,
        "bytes": sum(file.remote.size for file in files),
        "files": [
            {
                "path": str(file.path.relative_to(f"phase{phase}")),
                "size": file.remote.size,
                file.remote.algorithm: file.remote.digest,
            }
            for file in files
        ],
    }


def _is_signed(job: Job, plan: Plan) -> bool:
    """Whether each phase has the manifest that this plan would give it."""
    for phase in job.phases:
        try:
            manifest = read_manifest(job.dest / f"phase{phase}", KIND)
        except UserError:
            return False
        if {**manifest, **_body(job, plan, phase)} != manifest:
            return False
    return True


def _sign(job: Job, plan: Plan) -> None:
    """Write the manifest of each phase, now that all its files are here and proved."""
    for phase in job.phases:
        folder = job.dest / f"phase{phase}"
        files = [file for file in plan.files if file.phase == phase]
        rows = sum(fetch.parquet_rows(job.dest / file.path) for file in files)
        write_manifest(folder, KIND, {**_body(job, plan, phase), "rows": rows})


def preview(job: Job) -> list[str]:
    """Say what a job would bring, one line a phase, without writing anything.

    Raises:
        UserError: it does not fit on the disk, or the hub cannot be used.
    """
    _, hub = connect(job)
    plan = make_plan(job, hub)
    missing = set(plan.missing)
    lines = [f"{job.repo} at {plan.revision}"]
    for phase in job.phases:
        files = [file for file in plan.files if file.phase == phase]
        wanted = [file for file in files if file in missing]
        lines.append(f"phase {phase}: {_counted(files)}, of which to come: {_counted(wanted)}")
    lines.append(
        f"to come in all: {human_bytes(plan.bytes_wanted)} ({human_bytes(plan.bytes_here)} lie in "
        f"unfinished files already); free on the disk: {human_bytes(plan.free)}"
    )
    check_disk(plan, job.dest)
    return lines


def describe(summary: Summary) -> list[str]:
    """Say what a download did and which hosts it asked."""
    plan = summary.plan
    if summary.fetched:
        done = f"{counted(summary.fetched, 'file')} fetched and proved"
    elif plan.unproved:
        done = f"nothing to fetch; {counted(len(plan.unproved), 'file')} here hashed and right"
    else:
        done = "nothing to do"
    return [
        f"{done}; complete: {_counted(plan.files)}, at {plan.revision}",
        f"hosts asked: {', '.join(summary.hosts)}",
    ]


def _counted(files: list[LocalFile]) -> str:
    return f"{counted(len(files), 'file')}, {human_bytes(sum(file.remote.size for file in files))}"
