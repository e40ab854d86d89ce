"""Parquet files wherever they lie: one file, a folder, a glob, or hf:// on a hub."""

import glob
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kaiyuan.errors import UserError


@dataclass(frozen=True)
class Source:
    """A file to read: its name, its size in bytes, and a way to open it."""

    name: str
    size: int
    open: Callable[[], Any]
    remote: bool = False


def find_sources(paths: list[str]) -> list[Source]:
    """Return the parquet files that some paths mean, each once.

    Paths keep their order; see `local_files` for what each means.

    Raises:
        UserError: a path means no file.
    """
    sources: dict[str, Source] = {}
    for path in paths:
        for source in _on_hub(path) if path.startswith("hf://") else _local(path):
            sources.setdefault(source.name, source)
    return list(sources.values())


def local_files(path: str) -> list[Path]:
    """Return the files that a file, a folder or a glob means, under the names that they have there.

    A folder means all *.parquet below it. A file that is named itself is taken whatever its name.
    The files of a folder or a glob come in natural order of their paths ("part-9" before
    "part-10"); a link goes by its own name, not by that of the file it leads to.

    Raises:
        UserError: there is none, a link leads nowhere or to a folder below, or a name is not UTF-8.
    """
    folder = Path(path)
    if folder.is_dir():
        found = _below(folder)
    elif folder.exists():
        found = [folder]
    elif glob.has_magic(path):
        # Path.glob takes no absolute ones.
        found = [Path(match) for match in glob.glob(path, recursive=True)]  # noqa: PTH207
    else:
        raise UserError(f"{path} does not exist")
    files = [file for file in found if not file.is_dir()]
    if not files:
        raise UserError(f"no parquet files at {path}")
    for file in files:
        if not file.exists():
            raise UserError(f"{file} is a link to a file that is not there")
        try:
            str(file.absolute()).encode()
        except UnicodeEncodeError:
            raise UserError(f"the name {str(file)!r} is not UTF-8: rename it") from None
    return sorted(files, key=lambda file: _natural(file.as_posix()))


def _below(folder: Path) -> list[Path]:
    found = []
    for parent, names, files in os.walk(folder):
        links = [path for name in names if (path := Path(parent, name)).is_symlink()]
        for link in links:
            # Links may go in circles, and what is left out unsaid is missed by no one.
            if _is_data(link, folder) and any(link.rglob("*.parquet")):
                raise UserError(
                    f"{link} is a link to a folder with parquet files, which is not followed: "
                    "give what it leads to as an input of its own, and take the link away"
                )
        found += [Path(parent, name) for name in files if name.endswith(".parquet")]
    return [file for file in found if _is_data(file, folder)]


def _natural(name: str) -> list[str | int]:
    return [int(t) if i % 2 else t for i, t in enumerate(re.split(r"([0-9]+)", name))]


def _is_data(file: Path, folder: Path) -> bool:
    # Spark and the hub's client keep their own files under names with a leading _ or dot.
    return not any(part.startswith(("_", ".")) for part in file.relative_to(folder).parts)


def _local(path: str) -> list[Source]:
    files = local_files(path)
    return [Source(str(file), file.stat().st_size, partial(file.open, "rb")) for file in files]


def _on_hub(path: str) -> list[Source]:
    from huggingface_hub import HfFileSystem

    from kaiyuan.data.connection import hugging_face

    connection = hugging_face()
    endpoint = connection.endpoint
    system = HfFileSystem(endpoint=endpoint.url, token=endpoint.token or False)

    plain = path.removeprefix("hf://")
    ask: Any = system.glob if any(sign in plain for sign in "*?[") else system.find
    try:
        entries = connection.patiently(partial(ask, plain, detail=True), attempts=2)
    except UserError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        entries = {}
    found = [
        Source(f"hf://{name}", int(entry["size"]), partial(system.open, name, "rb"), remote=True)
        for name, entry in entries.items()
        if entry["type"] == "file" and name.lower().endswith(".parquet")
    ]
    if not found:
        raise UserError(f"no parquet files at {path}")
    return sorted(found, key=lambda source: _natural(source.name))
