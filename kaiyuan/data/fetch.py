"""Bring one file here, whole and proved, whatever the server or the power supply does.

Bytes are gathered in a part file whose name depends on the content that is wanted. Only after the
size, the hub's checksum and (parquet) the footer have been checked does it get its final name, so
a file under its final name is always complete.
"""

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import httpx2
import pyarrow as pa
import pyarrow.parquet as pq

from kaiyuan.data.connection import BadAnswer, Connection, Patience, Stopped
from kaiyuan.data.hub import RemoteFile
from kaiyuan.errors import UserError

_CHUNK = 1 << 20  # bytes
_WRONG_CONTENT_LIMIT = 3  # whole downloads with a wrong checksum before we give up on a file


class FileFault(Exception):
    """One file cannot be had; the others can still be brought."""


def part_name(remote: RemoteFile) -> str:
    """Return the name of the part file: another for every path and every content."""
    return hashlib.sha256(f"{remote.path}\n{remote.digest}".encode()).hexdigest()[:32] + ".part"


def digest_of(path: Path, algorithm: str) -> str:
    """Return the hexadecimal hash of a file as the hub computes it ("sha256" or "git-sha1")."""
    if algorithm == "git-sha1":
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def matches(path: Path, remote: RemoteFile) -> bool:
    """Whether a file here has the size and the content that the hub lists."""
    return path.stat().st_size == remote.size and digest_of(path, remote.algorithm) == remote.digest


def parquet_rows(path: Path) -> int:
    """Return the number of rows that a parquet file's footer declares.

    Raises:
        FileFault: it has no readable footer.
    """
    try:
        return int(pq.read_metadata(path).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise FileFault("is as the hub has it, but is not a readable parquet file") from error


def fetch(
    connection: Connection,
    remote: RemoteFile,
    address: tuple[str, dict[str, str]],
    part: Path,
    report: Callable[[int], None],
) -> None:
    """Fill ``part`` until it has the size and the checksum of ``remote``.

    Args:
        connection: the hub; its ``stop`` event ends the work.
        remote: what is wanted.
        address: URL and headers.
        part: where bytes gather; what is there already is gone on from.
        report: called with the number of bytes each time some arrive; less than zero when bytes
            counted before turned out to be worthless.

    Raises:
        FileFault: the content keeps differing from the checksum, or the file is not there.
        UserError: the server cannot be used, or the disk is full.
        Stopped: ``connection.stop`` was set.
    """
    patience, wrong = Patience(connection), 0
    part.touch()
    while True:
        have = part.stat().st_size
        if have >= remote.size:
            if matches(part, remote):
                return
            wrong += 1
            report(-have)
            part.write_bytes(b"")
            if wrong == _WRONG_CONTENT_LIMIT:
                raise FileFault(f"came {wrong} times with a checksum other than the hub's own")
            continue
        try:
            _append(connection, remote, address, part, report)
        except httpx2.HTTPStatusError as error:
            if error.response.status_code == 404:
                raise FileFault("is listed by the hub, which answers 404 for it") from error
            patience.wait(error)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk is full; make room and run again" if full else error.strerror
            raise UserError(f"cannot write to {part.parent}: {reason}") from error
        except (BadAnswer, httpx2.HTTPError) as error:
            if part.stat().st_size > have:
                patience.failures = 0
            patience.wait(error)


def _append(
    connection: Connection,
    remote: RemoteFile,
    address: tuple[str, dict[str, str]],
    part: Path,
    report: Callable[[int], None],
) -> None:
    """Ask once for what is missing and write what comes."""
    have = part.stat().st_size
    url, headers = address
    headers = {**headers, "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with connection.client().stream("GET", url, headers=headers) as answer:
        position = _start_of(answer, have, remote.size)
        with part.open("ab") as out:
            for chunk in answer.iter_bytes():
                if connection.stop.is_set():
                    raise Stopped
                # A server that ignores the range starts from the front: pass over what is here.
                fresh = chunk[max(have - position, 0) :]
                position += len(chunk)
                if position > remote.size:
                    raise BadAnswer("more bytes came than the file has")
                out.write(fresh)
                report(len(fresh))
    if position < remote.size:
        raise BadAnswer("the answer ended before the file did")


def _start_of(answer: httpx2.Response, have: int, size: int) -> int:
    """Return the position in the file of an answer's first byte, if it is a piece of that file."""
    if answer.status_code == 416:
        raise BadAnswer("the server has fewer bytes than the hub lists")
    answer.raise_for_status()
    encoded = answer.headers.get("Content-Encoding", "identity") != "identity"
    length = answer.headers.get("Content-Length")
    if answer.status_code == 206:
        if answer.headers.get("Content-Range", "") != f"bytes {have}-{size - 1}/{size}" or encoded:
            raise BadAnswer("the server sent another range than was asked for")
        return have
    page = answer.headers.get("Content-Type", "").startswith(("text/html", "application/json"))
    if answer.status_code != 200 or page or (not encoded and length not in (None, str(size))):
        # The usual culprit: a page that says sorry, with status 200.
        raise BadAnswer("the answer is something other than the file")
    return 0


def finish(part: Path, final: Path) -> None:
    """Give a proved part its final name, once its bytes are on the disk."""
    handle = os.open(part, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    part.replace(final)
