"""Megatron's loop as we run it: order of the data, other layouts, going on, repeating."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from kaiyuan.config import load_params
from kaiyuan.errors import UserError
from kaiyuan.plan import make_plan
from kaiyuan.train import phase_arguments
from kaiyuan.train import train as train_plan

from .conftest import run_kaiyuan

# 4 and 8 steps. The warm-up is shortened with them, so that each step changes something.
SHORT = (
    *("phase1.max_samples=32", "phase3.max_samples=64", "micro_batch_size=4"),
    *("lr_warmup_samples=16", "save_interval=3"),
)


def losses(run):
    with (run / "loss.csv").open() as stream:
        return [float(row["loss"]) for row in csv.DictReader(stream)]


@pytest.fixture(scope="module")
def two_phases(make_params):
    return make_params(["phase1", "phase3"])


@pytest.fixture(scope="module")
def train(demo, two_phases):
    def train(output, *more, phase=None):
        only = ["--phase", phase] if phase else []
        data = demo.folder / "data"
        return run_kaiyuan(
            "train", two_phases, "--data", data, "--output", output, *only, *more, *SHORT
        )

    return train


@pytest.fixture(scope="module")
def begun(train, tmp_path_factory):
    """A run of which the first phase is done: what all others start from."""
    run = tmp_path_factory.mktemp("begun") / "run"
    train(run, phase="phase1")
    return run


@pytest.fixture(scope="module")
def finished(train, begun):
    """The same training from its beginning to its end, in one process a phase."""
    run = begun.with_name("finished")
    train(run)
    return run


DUMP = """
import sys, numpy
import kaiyuan.megatron.pretrain as pretrain

forward, seen = pretrain.forward_step, []

def spy(batches, model):
    def tapped():
        batch = next(batches)
        seen.append((batch["tokens"].numpy(), batch["labels"].numpy()))
        yield batch
    return forward(tapped(), model)

pretrain.forward_step = spy
pretrain.run(sys.argv[2:])
tokens, labels = (numpy.concatenate(part) for part in zip(*seen))
numpy.savez(sys.argv[1], tokens=tokens, labels=labels)
"""


@pytest.mark.parametrize(
    "phase",
    [
        "phase3",
        pytest.param("phase4", marks=pytest.mark.slow),
        pytest.param("phase5", marks=pytest.mark.slow),
    ],
)
def test_each_token_that_is_trained_on_comes_from_its_row_in_rank_order(
    demo, make_params, tmp_path, phase
):
    # What Megatron's loop gives to the model, batch by batch.
    plan = make_plan(
        load_params(str(make_params([phase])), ["log_interval=1000"]), demo.folder / "data"
    )
    argv = phase_arguments(plan.phases[0], demo.folder / "data", tmp_path / "run")
    save = argv.index("--save")
    argv = argv[:save] + argv[save + 4 :]  # no checkpoints
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dump = tmp_path / "seen.npz"
    subprocess.run(
        [sys.executable, "-c", DUMP, dump, *argv], env=environment, check=True, capture_output=True
    )
    seen = np.load(dump)
    # What it should be: the parquet rows by rank, encoded by Hugging Face's tokenizer.
    rows = []
    for file in sorted((demo.folder / "corpus" / phase).glob("*.parquet")):
        table = pq.read_table(file).to_pydict()
        rows += [
            (rank, file.name, row, text)
            for row, (rank, text) in enumerate(zip(table["rank"], table["text"], strict=True))
            if text
        ]
    assert rows != sorted(rows), "the rows must not lie in order in the files"
    tokenizer = Tokenizer.from_file(str(demo.folder / "tokenizer" / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    stream, source = [], []
    for rank, file, row, text in sorted(rows):
        ids = [*tokenizer.encode(text).ids, end]
        stream += ids
        source += [(rank, file, row)] * len(ids)
    length = seen["tokens"].size
    assert length == plan.phases[0].samples * 256
    assert length > 0.9 * len(stream)
    trained = seen["tokens"].reshape(-1).tolist()
    different = [source[i] for i in range(length) if trained[i] != stream[i]]
    assert not different
    assert seen["labels"].reshape(-1).tolist() == stream[1 : length + 1]


def test_the_same_seed_gives_the_same_losses(begun, finished):
    assert losses(finished)[:4] == losses(begun)


@pytest.mark.parametrize(
    "changes",
    [(), pytest.param(("pipeline_model_parallel_size=2",), marks=pytest.mark.slow)],
    ids=["data parallel", "pipeline"],
)
def test_two_processes_give_the_same_curve(train, begun, finished, tmp_path, changes):
    run = tmp_path / "run"
    shutil.copytree(begun, run)
    train(run, "--nproc", 2, *changes)
    mine, reference = losses(run), losses(finished)
    assert len(mine) == len(reference) == 12
    np.testing.assert_allclose(mine, reference, rtol=0, atol=1e-4)
    assert mine[:4] == reference[:4]  # those of the common start


def test_going_on_after_kill_9_ends_with_the_same_losses(
    demo, two_phases, train, begun, finished, tmp_path
):
    # A resume from within a phase: there is a checkpoint after steps 6 and 9.
    run = tmp_path / "run"
    shutil.copytree(begun, run)
    command = [Path(sys.executable).with_name("kaiyuan"), "train", two_phases]
    command += ["--data", demo.folder / "data", "--output", run, *SHORT]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(losses(run)) < 10 and time.monotonic() < deadline:  # in the midst of phase 3
        time.sleep(0.05)
    for victim in (process.pid, *children(process.pid)):
        os.kill(victim, signal.SIGKILL)
    process.wait()
    assert 10 <= len(losses(run)) < 12
    train(run)
    assert losses(run) == losses(finished)


def children(pid):
    return [
        int(text)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for text in (task / "children").read_text().split()
    ]


def test_a_run_cannot_go_on_with_another_plan(demo, two_phases, begun):
    data = demo.folder / "data"
    plan = make_plan(load_params(str(two_phases), [*SHORT, "phase3.lr=1e-2"]), data)
    with pytest.raises(UserError, match=r"phase3 arguments lr was 0\.003 and is now"):
        train_plan(plan, data, begun)
