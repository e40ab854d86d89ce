"""The command line as a person runs it, and one demo that many tests look at."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

# A shell that starts the tests in the background lets them, and what they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent
PARAMS = ROOT / "scripts" / "kaiyuan2b-training" / "params"

Run = Callable[..., subprocess.CompletedProcess[str]]


def run_kaiyuan(*argv: object, check: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run the installed command; `check` is the exit code that it must have."""
    command = [str(Path(sys.executable).with_name("kaiyuan")), *map(str, argv)]
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


def one_line_error(*argv: object) -> str:
    """Run a command that must fail as a user's mistake does; return what it says."""
    done = run_kaiyuan(*argv, check=2)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("kaiyuan: ")
    return lines[0]


@pytest.fixture(scope="session")
def kaiyuan() -> Run:
    return run_kaiyuan


@dataclass(frozen=True)
class Demo:
    """A finished `kaiyuan demo`."""

    folder: Path
    output: str


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo") / "toy"
    return Demo(folder, run_kaiyuan("demo", "--out", folder).stdout)


@pytest.fixture(scope="session")
def make_params(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Sequence[str]], Path]:
    """Return a function that makes a copy of the toy's params with some of its phases only."""

    def make(phases: Sequence[str]) -> Path:
        folder = tmp_path_factory.mktemp("params") / "few"
        shutil.copytree(PARAMS / "toy", folder)
        for name in ("data", "hparams"):
            path = folder / f"{name}.yaml"
            content = yaml.safe_load(path.read_text())
            kept = {k: v for k, v in content["phases"].items() if k in phases}
            path.write_text(yaml.safe_dump({**content, "phases": kept}))
        return folder

    return make
