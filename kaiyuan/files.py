"""Atomic writes, content hashes and manifests.

Every artefact of kaiyuan has a ``manifest.json`` that is written last. A folder without one is
unfinished, whatever else lies in it.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from kaiyuan.errors import UserError

MANIFEST = "manifest.json"
_LOCK = "lock"
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # another on each machine, and after each start
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def make_folder(path: Path) -> None:
    """Make a folder, unless it is there, and try whether it can be written to.

    Raises:
        UserError: it cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error
    check_writable(path)


def check_writable(path: Path) -> None:
    """Try to write to a folder, or to where it would be made; leaves nothing there.

    Raises:
        UserError: it cannot be written to.
    """
    try:
        with tempfile.TemporaryFile(dir=nearest(path)):
            pass
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error


def nearest(path: Path) -> Path:
    """Return a path, or the nearest of the folders that it would lie in, that exists."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())


@contextlib.contextmanager
def atomic_write(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a temporary file that takes the place of ``path`` when the block ends without error.

    The data is on the disk (fsync) before the name is; a reader sees the old file or the new
    one, never a part of it.

    Raises:
        UserError: the folder cannot be written to, the disk is full, or ``path`` is a folder.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder, where a file is to be written: name the file")
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not mkstemp, whose files only their owner can read.
        stream = temporary.open(mode.replace("w", "x"), encoding=None if "b" in mode else "utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror}") from error
    try:
        with stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        _refuse_full_disk(path, error)
        raise
    _sync_folder(path.parent)


class HashedStream:
    """A writable binary stream that knows the size and SHA-256 of what went through it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> None:
        """Write bytes, or anything with a buffer."""
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self._hash.update(view)
        self.size += len(view)

    def entry(self) -> dict[str, Any]:
        """Return ``{"size": bytes, "sha256": hexadecimal}``, as manifests hold it of each file."""
        return {"size": self.size, "sha256": self._hash.hexdigest()}


@contextlib.contextmanager
def hashed_write(path: Path) -> Iterator[HashedStream]:
    """Write a file atomically (see `atomic_write`) and hash it on the way."""
    with atomic_write(path) as stream:
        yield HashedStream(stream)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Make a folder that appears under its name when the block ends without error, or not at all.

    It lies in a hidden folder beside ``path`` until then. Where a process was killed, the hidden
    folder stays; the next one that makes ``path`` removes it.

    Yields:
        The folder, under its temporary name.

    Raises:
        UserError: ``path`` exists and is not an empty folder, it cannot be made there, or the disk
            is full.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists already: remove it, or name another output")
    prefix = f".{path.name}."
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent, prefix)
        hidden = Path(tempfile.mkdtemp(dir=path.parent, prefix=prefix))
    except OSError as error:
        raise UserError(f"cannot write to {path}: {error.strerror}") from error
    try:
        with _held(hidden):
            temporary = hidden / "folder"
            temporary.mkdir()
            yield temporary
            try:
                temporary.replace(path)
            except OSError as error:
                raise UserError(f"{path} was made by another process meanwhile") from error
    except BaseException as error:
        _refuse_full_disk(path, error)
        raise
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    _sync_folder(path.parent)


@contextlib.contextmanager
def _held(hidden: Path) -> Iterator[None]:
    """Hold the lock of a hidden folder; it goes with the process, however that ends.

    The file gets its name when it is locked, so that nobody finds it free in between. It says
    which machine may judge by it: on a network file system a lock may not be seen on others.
    """
    with (hidden / "new").open("w") as stream:
        with contextlib.suppress(OSError):  # a file system without locks: it is never removed
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stream.write(_BOOT.read_text())
            stream.flush()
            (hidden / "new").rename(hidden / _LOCK)
        yield


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove the hidden folders whose process, on this machine, is no more."""
    for hidden in folder.iterdir():
        if not hidden.name.startswith(prefix):
            continue
        with contextlib.suppress(OSError):
            with (hidden / _LOCK).open("r+") as stream:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or an error: it is held
                ours = stream.read() == _BOOT.read_text()
            if ours:
                shutil.rmtree(hidden, ignore_errors=True)


def _refuse_full_disk(path: Path, error: BaseException | None) -> None:
    """Raise a UserError where an error came of a full disk, be it wrapped in a library's own."""
    if isinstance(error, UserError):
        return
    while error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        error = error.__cause__ or error.__context__


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_of_json(value: object) -> str:
    """Return the SHA-256 of a JSON value in its canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    with atomic_write(path, "w") as stream:
        json.dump(value, stream, indent=1, ensure_ascii=False)
        stream.write("\n")


def write_manifest(
    folder: Path, kind: str, body: dict[str, Any], name: str = MANIFEST
) -> dict[str, Any]:
    """Write ``folder/manifest.json``, sealed with a hash of its own content.

    Args:
        folder: the artefact; all its other files must be complete.
        kind: what the folder is ("corpus", "tokenizer", "phase", "checkpoint" ...).
        body: JSON values.
        name: another name of the file, where a folder is described before it is complete.

    Returns:
        The manifest as written, with ``kind`` and ``seal``.
    """
    manifest = {"kind": kind, **body}
    manifest["seal"] = sha256_of_json(manifest)
    write_json(folder / name, manifest)
    return manifest


def read_manifest(folder: Path, kind: str, name: str = MANIFEST) -> dict[str, Any]:
    """Read and check ``folder/manifest.json``, or the file of another name.

    Raises:
        UserError: there is none, it was altered or cut short, or it is of another kind.
    """
    path = folder / name
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{folder} has no {name}: it does not exist or its making was not finished"
        ) from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict):
        raise UserError(f"{path} is not a manifest")
    seal = manifest.pop("seal", None)
    if seal != sha256_of_json(manifest):
        raise UserError(f"{path} was altered after it was written: its seal does not fit")
    if manifest.get("kind") != kind:
        raise UserError(f"{folder} is a {manifest.get('kind')}, where a {kind} is needed")
    return {**manifest, "seal": seal}
