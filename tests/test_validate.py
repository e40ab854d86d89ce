"""The loss of the checkpoints of a run on held-out data."""

import csv
import math
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from kaiyuan.data.phase import ConvertedPhase

from .conftest import one_line_error, run_kaiyuan

SEQUENCE = 256  # of the toy


@pytest.fixture(scope="module")
def validated(demo, tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "run"
    shutil.copytree(demo.folder / "run", run)
    done = run_kaiyuan("validate", run, "--data", demo.folder / "data" / "phase5")
    with (run / "validation-phase5.csv").open() as stream:
        return run, done, list(csv.DictReader(stream))


def stream_of(demo) -> np.ndarray:
    """All tokens of the phase in training order."""
    phase = ConvertedPhase.open(demo.folder / "data" / "phase5")
    return np.concatenate([phase.tokens(document) for document in phase.order()])


def transformers_loss(demo, starts: range) -> float:
    """Mean over samples of the loss that transformers itself computes of its labels."""
    model = AutoModelForCausalLM.from_pretrained(demo.folder / "model", dtype=torch.float32)
    stream = torch.from_numpy(stream_of(demo).astype(np.int64))
    losses = []
    with torch.inference_mode():
        for start in starts:
            ids = stream[None, start : start + SEQUENCE + 1]
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    return sum(losses) / len(losses)


def test_the_last_point_is_transformers_loss_of_the_export(demo, validated):
    _, _, rows = validated
    last_start = len(stream_of(demo)) - SEQUENCE - 1
    loss = transformers_loss(demo, range(0, last_start + 1, SEQUENCE))
    assert float(rows[-1]["loss"]) == pytest.approx(loss, abs=1e-4)
    # Of the parquet, not of the manifest.
    texts = pq.read_table(demo.folder / "corpus" / "phase5")["text"].to_pylist()
    text_bytes = sum(len(text.encode()) for text in texts if text)
    bits = loss * len(stream_of(demo)) / math.log(2) / text_bytes
    assert float(rows[-1]["bits_per_byte"]) == pytest.approx(bits, abs=1e-4)


def test_every_checkpoint_is_a_point_of_the_curve(demo, validated):
    run, done, rows = validated
    folders = sorted(path.name for path in (run / "checkpoints").glob("iter_*"))
    assert [f"iter_{int(row['iteration']):07d}" for row in rows] == folders
    assert len(rows) > 2
    assert float(rows[0]["loss"]) > float(rows[-1]["loss"])
    assert (run / "validation-phase5.png").read_bytes().startswith(b"\x89PNG")
    assert "not held-out data" in done.stderr  # the toy was trained on it


def test_samples_are_spread_over_the_data(demo, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(demo.folder / "run", run)
    run_kaiyuan("validate", run, "--data", demo.folder / "data" / "phase5", "--samples", 2)
    with (run / "validation-phase5.csv").open() as stream:
        got = float(list(csv.DictReader(stream))[-1]["loss"])
    half = (len(stream_of(demo)) - 1) // SEQUENCE // 2
    assert got == pytest.approx(transformers_loss(demo, (0, half * SEQUENCE)), abs=1e-4)


def test_data_of_another_tokenizer(demo, tmp_path):
    tokenizer, data = tmp_path / "tokenizer", tmp_path / "data"
    source = demo.folder / "corpus" / "phase5"
    run_kaiyuan("train-tokenizer", "--input", source, "--output", tokenizer, "--vocab-size", 500)
    run_kaiyuan("convert", "--input", source, "--output", data, "--tokenizer", tokenizer)
    said = one_line_error("validate", demo.folder / "run", "--data", data)
    assert "another tokenizer" in said
