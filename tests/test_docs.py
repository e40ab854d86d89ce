"""Every command that the READMEs show is run, and both READMEs show the same ones."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

READMES = ("README.md", "README.zh.md")


def commands(readme: str) -> list[str]:
    text = (ROOT / readme).read_text(encoding="utf-8")
    lines = "".join(re.findall(r"```bash\n(.*?)```", text, re.S)).splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.strip()]


def test_both_show_the_same_commands():
    assert commands("README.md") == commands("README.zh.md")
    assert len(commands("README.md")) > 10


def test_both_have_the_same_sections_and_tables():
    def shape(readme):
        lines = (ROOT / readme).read_text(encoding="utf-8").splitlines()
        return [
            re.match(r"#+|\||\d\.|-", line)[0] for line in lines if re.match(r"#|\||\d\.|- ", line)
        ]

    assert shape("README.md") == shape("README.zh.md")


def test_links_lead_somewhere():
    for readme in (*READMES, "CONTRIBUTING.md"):
        text = (ROOT / readme).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)]+)\)", text):
            assert target.startswith("https://") or (ROOT / target).exists(), (readme, target)


@pytest.fixture(scope="module")
def newcomer(demo, tmp_path_factory):
    """A folder with the toy that the demo made, and what the commands so far made."""
    folder = tmp_path_factory.mktemp("newcomer")
    shutil.copytree(demo.folder, folder / "toy")
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The tests' own environment, but what sets it up or checks the whole project is only noted."""
    tools = tmp_path_factory.mktemp("venv") / "bin"
    tools.mkdir()
    python = tools / "python"
    python.write_text(
        "#!/bin/bash\n"
        f'case "$*" in "-m pip"*|"-m ruff"*|"-m mypy"*) echo "$*" >>{tools}/noted; exit;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (tools / "kaiyuan").symlink_to(Path(sys.executable).with_name("kaiyuan"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "KAIYUAN_VENV": str(tools.parent)}


@pytest.mark.parametrize("command", commands("README.md"))
def test_the_command_works(newcomer, environment, command):
    words = shlex.split(command)
    if words[0] == "source":  # the environment is that of the tests
        return
    folder = newcomer
    if words[0] == "bash":
        # Another test of the suite runs the demo; the suite cannot run itself.
        folder = ROOT
        words = [*words, "--help"]
    elif words[:2] == ["kaiyuan", "download"]:
        words = [*words, "--help"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    if "run_tests.sh" in command:
        noted = Path(environment["KAIYUAN_VENV"], "bin", "noted").read_text()
        assert re.findall("^-m (pip install|ruff check|ruff format|mypy)", noted, re.M)[-4:] == [
            *("pip install", "ruff check", "ruff format", "mypy")
        ]
