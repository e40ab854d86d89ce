"""HTML pages, written where a person says; they take the place of nothing but such a page."""

from pathlib import Path

from kaiyuan.errors import UserError
from kaiyuan.files import atomic_write

# How the title of every page ends, in the templates; within so many bytes, long names and all.
_MARK = " · kaiyuan</title>".encode()
_HEAD = 4096


def check_page(path: Path) -> None:
    """Check that a page may be written, before the work for it is done.

    Raises:
        UserError: another file is there, which would be lost.
    """
    try:
        with path.open("rb") as stream:
            ours = _MARK in stream.read(_HEAD)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return  # a folder in the way is told of in writing
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not ours:
        raise UserError(
            f"{path} is there already and no page of kaiyuan's: name another file, or remove it"
        )


def write_html_file(path: Path, text: str) -> None:
    """Write a page that was rendered.

    Raises:
        UserError: see `check_page` and `kaiyuan.files.atomic_write`.
    """
    check_page(path)
    with atomic_write(path, "w") as stream:
        stream.write(text)
