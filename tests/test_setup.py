"""scripts/setup.sh finds an interpreter that fits, or says what to install."""

import os
import subprocess
import sys

import pytest

from .conftest import ROOT


def find_python(path, **variables):
    functions = (ROOT / "scripts" / "setup.sh").read_text().split("set_up() {")[0]
    # BASH_SOURCE is empty in a command string.
    functions = functions.replace("${BASH_SOURCE[0]}", str(ROOT / "scripts" / "setup.sh"))
    done = subprocess.run(
        ["/bin/bash", "-c", functions + "\nfind_python"],
        capture_output=True,
        text=True,
        env={"PATH": f"{path}:/usr/bin:/bin", **variables},
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


@pytest.fixture
def tools(tmp_path):
    """A folder that comes first on the PATH, with no interpreter that starts."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        return path

    for name in ("python3.12", "python3.13", "python3", "pyenv", "uv"):
        write(name, "echo 'command not found' >&2; exit 127")
    return tmp_path, write


def real(target="$@"):
    return f'exec {sys.executable} "{target}"'


def test_the_one_that_is_asked_for(tools):
    folder, write = tools
    mine = write("mine/python", real())
    assert find_python(folder, PYTHON=str(mine)) == (0, str(mine), "")
    code, _, said = find_python(folder, PYTHON="/usr/bin/false")
    assert code == 1 and said == "PYTHON=/usr/bin/false is no Python 3.12 or 3.13 with venv"


def test_one_on_the_path_that_starts(tools):
    folder, write = tools
    # python3.12 stays one that refuses, as pyenv's shims do.
    write("python3.13", real())
    assert find_python(folder)[:2] == (0, str(folder / "python3.13"))


def test_one_that_pyenv_keeps(tools):
    folder, write = tools
    write("pyenv", f'[ "$1" = root ] && echo {folder}/root')
    write("root/versions/3.11.9/bin/python", real())
    kept = write("root/versions/3.12.4/bin/python", real())
    assert find_python(folder)[:2] == (0, str(kept))


def test_one_that_uv_finds(tools):
    folder, write = tools
    found = write("uvs/python", real())
    write("uv", f'[ "$1 $2" = "python find" ] && echo {found}')
    assert find_python(folder)[:2] == (0, str(found))


def test_otherwise_one_line_says_what_to_install(tools):
    folder, _ = tools
    code, out, said = find_python(folder)
    assert code == 1 and not out
    assert len(said.splitlines()) == 1
    assert "no Python 3.12 or 3.13 found: install one" in said


def test_a_second_set_up_does_nothing(tmp_path):
    """With the stamp of the last one, setup.sh runs neither pip nor python."""
    script = f"source {ROOT}/scripts/setup.sh test"
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text("#!/bin/bash\necho called; exit 1\n")
    (venv / "bin" / "python").chmod(0o755)
    stamp = subprocess.run(
        ["bash", "-c", f"cat {ROOT}/pyproject.toml {ROOT}/scripts/setup.sh | sha256sum"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()[0]
    (venv / ".kaiyuan-test").write_text(f"{stamp} {ROOT}\n")
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "KAIYUAN_VENV": str(venv)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
