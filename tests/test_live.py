"""What a running training shows: on a terminal a live block, elsewhere plain lines."""

import contextlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from kaiyuan.config import load_params
from kaiyuan.live import TrainingView
from kaiyuan.plan import make_plan
from kaiyuan.progress import human_count, human_seconds

from .conftest import ROOT


def step(number, **more):
    values = {"step": number, "loss": 2.5, "learning_rate": 3e-3, "seconds": 2.0}
    return json.dumps(
        values | {"tokens_per_second": 1_234_567.0, "mfu": 0.481, "due": number % 10 == 0} | more
    )


@pytest.fixture(scope="module")
def plan():
    """Phases of 100, 50 and more steps."""
    batch = load_params("toy").hparams["global_batch_size"]
    return make_plan(load_params("toy", [f"phase1.max_samples={100 * batch}"]))


def terminal(width=100):
    return Console(file=io.StringIO(), record=True, force_terminal=True, width=width)


def plain():
    return Console(file=io.StringIO(), force_terminal=False, width=100)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_the_block_says_where_the_training_is(plan, width):
    phase = plan.phases[0]
    console = terminal(width)
    view = TrainingView(phase, plan.steps, console)
    for number in range(1, 26):
        # A save takes long once; what is left goes by the usual step.
        assert view.update(step(number, seconds=60.0 if number == 7 else 2.0))
    console.print(view.render())
    lines = console.export_text().splitlines()
    assert len(lines) == 3
    figures = "loss 2.5000, learning rate 3.00e-03, 1.23 M tokens/s, MFU 48.1%"
    assert lines[0].strip() == figures or (width < 70 and figures[:50] in lines[0])
    assert all(len(line) <= width for line in lines)
    # 75 steps of two seconds, and those of the whole run.
    assert "phase1" in lines[1] and "25 of 100, 25%" in lines[1]
    assert lines[1].rstrip().endswith("2 min 30 s left")
    left = human_seconds((plan.steps - 25) * 2)
    assert f"25 of {plan.steps:,}" in lines[2] and lines[2].rstrip().endswith(f"{left} left")


def test_the_block_before_the_first_step_and_while_stopping(plan):
    signals = []
    console = terminal()
    begun = plan.phases[1].first_step + 5  # by those that were interrupted
    view = TrainingView(plan.phases[1], plan.steps, console, signals, begun)
    console.print(view.render())
    said = console.export_text()
    assert "starting the processes" in said
    assert f"5 of {plan.phases[1].steps:,}" in said
    assert f"{begun:,} of {plan.steps:,}" in said
    signals.append(signal.SIGINT)
    view.update(step(plan.phases[1].first_step + 1))
    console.print(view.render())
    assert "stopping: saving after this step" in console.export_text()


def test_plain_lines_where_there_is_no_terminal(plan):
    console = plain()
    with TrainingView(plan.phases[0], plan.steps, console) as view:
        for number in range(1, 26):
            view.update(step(number, mfu=None))
    assert console.file.getvalue().splitlines() == [
        f"  step {n} of {plan.steps}: loss 2.5000, learning rate 3.00e-03, 1.23 M tokens/s"
        for n in (10, 20)
    ]


def test_what_is_no_step_is_left_to_the_log(plan):
    view = TrainingView(plan.phases[0], plan.steps, plain())
    assert not view.update('{"step": 3, "lo')
    assert not view.update("[1, 2]")
    assert not view.update('{"step": 3}')


def test_words_for_numbers():
    seconds = {0.4: "0 s", 41: "41 s", 60: "1 min", 200: "3 min 20 s", 7500: "2 h 5 min"}
    assert [human_seconds(n) for n in seconds] == list(seconds.values())
    assert human_seconds(12 * 86400 + 3 * 3600 + 59) == "12 d 3 h"
    counts = {987: "987", 1234: "1.23 k", 99_960: "100 k", 999_600: "1.00 M", 2.2e12: "2.20 T"}
    assert [human_count(n) for n in counts] == list(counts.values())


@pytest.mark.slow
def test_a_real_training_on_a_terminal(demo, make_params, tmp_path):
    """The launcher in a terminal of 100 columns, which a second process reads."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "kaiyuan", "train", make_params(["phase1"])]
    command += ["--data", demo.folder / "data", "--output", run, "phase1.max_samples=96"]
    command += ["lr_warmup_samples=40"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    environment |= {"COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        list(map(str, command)), stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    said = b""
    deadline = time.monotonic() + 120
    with contextlib.suppress(OSError):  # the end of a terminal
        while time.monotonic() < deadline and (part := os.read(ours, 65536)):
            said += part
    os.close(ours)
    assert process.wait() == 0, said.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    assert "starting the processes" in text
    shown = {int(number) for number in re.findall(r"(\d+) of 12, \d+%", text)}
    assert len(shown) > 2  # the block moved
    assert re.search(r"\d s left", text)
    # The block gives way to the last step, and Megatron's flood is in the log only.
    assert re.search(r"step 12 of 12: loss [\d.]+, learning rate 5.00e-03, [\d.]+ k tokens/s", text)
    assert "elapsed time per iteration" not in text
    log = (run / "logs" / "phase1-node0.log").read_text()
    assert "elapsed time per iteration" in log
    assert '"learning_rate"' not in log
