"""Folders and files that appear whole or not at all, whoever is killed or writes beside."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kaiyuan.errors import UserError
from kaiyuan.files import atomic_folder, atomic_write

# Makes a folder, says so, and ends it when its standard input ends.
WRITER = """
import sys
from pathlib import Path
from kaiyuan.files import atomic_folder
with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "data").write_bytes(bytes(1000))
    print("begun", flush=True)
    sys.stdin.read()
"""


def begin(output: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(output)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"begun\n"
    return writer


def kill(writer: subprocess.Popen) -> None:
    writer.send_signal(signal.SIGKILL)
    writer.communicate()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    kill(begin(tmp_path / "out"))
    (left,) = names(tmp_path)
    assert left.startswith(".out.")
    with atomic_folder(tmp_path / "out") as folder:
        assert left not in names(tmp_path)
        (folder / "data").touch()
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["data"]


def test_what_is_being_written_is_left_alone(tmp_path):
    writers = [begin(tmp_path / "out") for _ in range(2)]
    assert len(names(tmp_path)) == 2
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "out"):
        assert len(names(tmp_path)) == 3
        raise KeyboardInterrupt
    assert len(names(tmp_path)) == 2
    writers[0].communicate()
    assert writers[0].returncode == 0
    assert (tmp_path / "out/data").stat().st_size == 1000
    _, told = writers[1].communicate(), writers[1].returncode
    assert told != 0  # the name was taken meanwhile
    assert names(tmp_path) == ["out"]


def test_only_leftovers_of_this_machine_are_removed(tmp_path):
    """Whether another machine holds a lock may not be seen here; others' folders are not ours."""
    (tmp_path / ".out.notes123").mkdir()
    (tmp_path / ".out.notes123/lock").write_text("mine")
    (tmp_path / ".out.file").write_text("mine")
    kill(begin(tmp_path / "out"))
    (left,) = set(names(tmp_path)) - {".out.notes123", ".out.file"}
    lock = tmp_path / left / "lock"
    here = lock.read_text()
    lock.write_text("another boot")
    with atomic_folder(tmp_path / "out"):
        pass
    assert names(tmp_path) == sorted([".out.file", ".out.notes123", left, "out"])
    lock.write_text(here)
    (tmp_path / "out").rmdir()
    with atomic_folder(tmp_path / "out"):
        pass
    assert names(tmp_path) == [".out.file", ".out.notes123", "out"]


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with atomic_folder(tmp_path / "out") as folder, atomic_folder(tmp_path / "out2"):
        (folder / "data").touch()
    assert names(tmp_path) == ["out", "out2"]


def test_files_get_the_usual_mode_whichever_threads_write_beside(tmp_path, monkeypatch):
    """The umask is the whole process's: who sets it to read it lays it bare to all threads."""
    usual, set_umask = umask(), os.umask

    def slowly(mask: int) -> int:
        before = set_umask(mask)
        time.sleep(0.002)
        return before

    monkeypatch.setattr(os, "umask", slowly)
    (tmp_path / "plain").touch()
    (tmp_path / "plain_folder").mkdir()

    def write(number: int) -> None:
        for turn in range(10):
            with atomic_write(tmp_path / f"file{number}") as stream:
                stream.write(b"x")
            with atomic_folder(tmp_path / f"folder{number}.{turn}"):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    found = umask()
    set_umask(int(usual, 8))
    assert found == usual != "0000"
    modes = {name: (tmp_path / name).stat().st_mode for name in names(tmp_path)}
    assert {modes[name] for name in modes if name.startswith("file")} == {modes["plain"]}
    assert {modes[name] for name in modes if name.startswith("folder")} == {modes["plain_folder"]}


def umask() -> str:
    return re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[1]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    for write in (atomic_write, atomic_folder):
        with pytest.raises(UserError, match="cannot write to"), write(tmp_path / "file/out"):
            pass
