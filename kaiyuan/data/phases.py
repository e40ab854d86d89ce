"""Find the five phases among a repository's files, and a safe place for each file here."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kaiyuan.data.hub import RemoteFile
from kaiyuan.errors import UserError

PHASES = (1, 2, 3, 4, 5)
_FOLDER = re.compile(r"phase[-_ ]?0*([1-9])", re.IGNORECASE)
_LONGEST_NAME = 255  # bytes, of Linux file systems


@dataclass(frozen=True)
class LocalFile:
    """A file of a phase: as the hub has it, and where it goes below the destination."""

    remote: RemoteFile
    phase: int
    path: PurePosixPath


def parse_phases(text: str) -> list[int]:
    """Read "1,2", "3-5" or "all" as a sorted list of phases.

    Raises:
        UserError: it is none of these, or names a phase outside 1 to 5.
    """
    if text.strip().lower() == "all":
        return list(PHASES)
    chosen: set[int] = set()
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d)\s*(?:-\s*(\d)\s*)?", piece)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not PHASES[0] <= first <= last <= PHASES[-1]:
            raise UserError(f"--phase takes numbers from 1 to 5, such as 1,2 or 3-5, not {text!r}")
        chosen.update(range(first, last + 1))
    return sorted(chosen)


def files_of_phases(listing: list[RemoteFile], phases: list[int]) -> list[LocalFile]:
    """Pick the parquet files of some phases out of a repository's listing.

    A phase is a folder named phase1, phase_1, Phase-01 or the like, at any depth; here it becomes
    phase1. Other files of the repository are left out.

    Raises:
        UserError: a phase is not there or is there twice, or a name would leave its folder.
    """
    folders: dict[int, set[str]] = {}
    found: list[LocalFile] = []
    for remote in listing:
        if not remote.path.lower().endswith(".parquet"):
            continue
        parts = remote.path.split("/")
        for depth, name in enumerate(parts[:-1]):
            match = _FOLDER.fullmatch(name)
            if match:
                phase = int(match[1])
                if phase in phases:
                    folders.setdefault(phase, set()).add("/".join(parts[: depth + 1]))
                    found.append(LocalFile(remote, phase, _safe(phase, remote.path, depth)))
                break
    for phase in phases:
        if phase not in folders:
            raise UserError(f"no folder for phase {phase} on the hub; {_what_there_is(listing)}")
        if len(folders[phase]) > 1:
            raise UserError(f"phase {phase} is there twice: {', '.join(sorted(folders[phase]))}")
    return sorted(found, key=lambda file: (file.phase, str(file.path)))


def _safe(phase: int, path: str, depth: int) -> PurePosixPath:
    """Return a place below the destination for a name that a hub made up."""
    for name in path.split("/"):
        if (
            name in ("", ".", "..")
            or "\\" in name
            or not name.isprintable()
            or len(name.encode(errors="replace")) > _LONGEST_NAME
        ):
            raise UserError(f"the hub lists a file with an unsafe name: {path[:200]!r}")
    return PurePosixPath(f"phase{phase}", *path.split("/")[depth + 1 :])


def _what_there_is(listing: list[RemoteFile]) -> str:
    folders: dict[str, int] = {}
    for remote in listing:
        if remote.path.lower().endswith(".parquet"):
            folder = str(PurePosixPath(remote.path).parent)
            folders[folder] = folders.get(folder, 0) + 1
    if not folders:
        return f"none of its {len(listing)} files is parquet"
    named = [f"{name!r} ({count})" for name, count in sorted(folders.items())]
    more = f" and {len(named) - 8} more" if len(named) > 8 else ""
    return f"its folders with parquet files are {', '.join(named[:8])}{more}"


def check_inside(dest: Path, path: PurePosixPath) -> Path:
    """Return where a file lies below the destination.

    Raises:
        UserError: a symbolic link on the way leads out of the destination.
    """
    target = dest / path
    root = dest.resolve()
    if not target.parent.resolve().is_relative_to(root):
        raise UserError(f"{target.parent} is a link that leads out of {dest}; remove it")
    return target
