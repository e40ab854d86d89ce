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

    A folder means all *.parquet below it. A file that is named itself is taken whatever its name.
    Paths keep their order; the files of a folder or a glob come in natural order of their names
    ("part-9" before "part-10"), as convert takes them.

    Raises:
        UserError: a path means no file.
    """
    sources: dict[str, Source] = {}
    for path in paths:
        found = _on_hub(path) if path.startswith("hf://") else _local(path)
        if not found:
            raise UserError(f"no parquet files at {path}")
        for source in sorted(found, key=lambda source: _natural(source.name)):
            sources.setdefault(source.name, source)
    return list(sources.values())


def _natural(name: str) -> list[str | int]:
    return [int(t) if i % 2 else t for i, t in enumerate(re.split(r"([0-9]+)", name))]


def _local(path: str) -> list[Source]:
    if Path(path).is_dir():
        files = [file for file in Path(path).rglob("*.parquet") if _is_data(file, Path(path))]
    elif Path(path).exists():
        files = [Path(path)]
    else:
        matches = glob.glob(path, recursive=True)  # noqa: PTH207 (Path.glob: no absolute ones)
        files = [Path(match) for match in matches if Path(match).is_file()]
    return [Source(str(file), file.stat().st_size, partial(file.open, "rb")) for file in files]


def _is_data(file: Path, folder: Path) -> bool:
    """Spark and downloads keep files of their own under names that begin with _ or a dot."""
    parts = file.relative_to(folder).parts
    return file.is_file() and not any(part.startswith(("_", ".")) for part in parts)


def _on_hub(path: str) -> list[Source]:
    from huggingface_hub import HfFileSystem

    from kaiyuan.data.connection import (
        HUGGING_FACE,
        Connection,
        Endpoint,
        token_from_environment,
    )

    endpoint = Endpoint(os.environ.get("HF_ENDPOINT") or HUGGING_FACE, token_from_environment("hf"))
    connection = Connection(endpoint)
    system = HfFileSystem(endpoint=endpoint.url, token=endpoint.token or False)

    plain = path.removeprefix("hf://")
    ask: Any = system.glob if any(sign in plain for sign in "*?[") else system.find
    try:
        entries = connection.patiently(partial(ask, plain, detail=True), attempts=2)
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return []
        raise
    return [
        Source(f"hf://{name}", int(entry["size"]), partial(system.open, name, "rb"), remote=True)
        for name, entry in entries.items()
        if entry["type"] == "file" and name.lower().endswith(".parquet")
    ]
