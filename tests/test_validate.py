"""The loss of the checkpoints of a run on held-out data."""

import csv
import math
import shutil
from itertools import pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.errors import UserError
from kaiyuan.files import read_manifest, write_manifest
from kaiyuan.validate import Validation, _documents_apart

from .conftest import run_kaiyuan

SEQUENCE = 256  # of the toy
SAMPLES = 30


@pytest.fixture(scope="module")
def validated(demo, tmp_path_factory):
    run = tmp_path_factory.mktemp("run") / "run"
    shutil.copytree(demo.folder / "run", run)
    done = run_kaiyuan(
        "validate", run, "--data", demo.folder / "data" / "phase5", "--samples", SAMPLES
    )
    (table,) = run.glob("validation-phase5-*.csv")
    with table.open() as stream:
        return run, done, list(csv.DictReader(stream))


def stream_of(demo) -> np.ndarray:
    """All tokens of the phase in training order."""
    phase = ConvertedPhase.open(demo.folder / "data" / "phase5")
    return np.concatenate([phase.tokens(document) for document in phase.order()])


def transformers_loss(demo) -> float:
    """Mean over samples, evenly over the data, of the loss that transformers itself computes."""
    model = AutoModelForCausalLM.from_pretrained(demo.folder / "model", dtype=torch.float32)
    stream = torch.from_numpy(stream_of(demo).astype(np.int64))
    there = (len(stream) - 1) // SEQUENCE
    losses = []
    with torch.inference_mode():
        for number in range(SAMPLES):
            start = number * there // SAMPLES * SEQUENCE
            ids = stream[None, start : start + SEQUENCE + 1]
            losses.append(model(input_ids=ids, labels=ids).loss.item())
    return sum(losses) / len(losses)


def test_an_average_and_one_iteration_can_be_measured(demo, validated, tmp_path):
    run, _, rows = validated
    data, averaged = demo.folder / "data" / "phase5", tmp_path / "averaged"
    # The average of one checkpoint is that checkpoint.
    run_kaiyuan("average", run, "--last", 1, "--output", averaged)
    run_kaiyuan("validate", averaged, "--data", data, "--samples", SAMPLES)
    (table,) = averaged.glob("validation-phase5-*.csv")
    with table.open() as stream:
        assert list(csv.DictReader(stream)) == rows[-1:]
    first = next((run / "checkpoints").glob(f"iter_*{rows[0]['iteration']}"))
    one = Validation(first, data, SAMPLES)
    assert [str(info.iteration) for info in one.checkpoints] == [rows[0]["iteration"]]
    assert one.name.parent == run
    assert one.name.name.startswith(f"validation-{first.name}-phase5-")


def test_the_last_point_is_transformers_loss_of_the_export(demo, validated):
    _, _, rows = validated
    loss = transformers_loss(demo)
    assert float(rows[-1]["loss"]) == pytest.approx(loss, abs=1e-4)
    # Of the parquet, not of the manifest.
    texts = pq.read_table(demo.folder / "corpus" / "phase5")["text"].to_pylist()
    text_bytes = sum(len(text.encode()) for text in texts if text)
    bits = loss * len(stream_of(demo)) / math.log(2) / text_bytes
    assert float(rows[-1]["bits_per_byte"]) == pytest.approx(bits, abs=1e-4)


def test_documents_are_kept_apart_where_training_kept_them_apart(demo, tmp_path):
    # The last phase alone was trained so, by what run.json says.
    run = shutil.copytree(demo.folder / "run", tmp_path / "run")
    described = read_manifest(run, "run", "run.json")
    described["phases"][-1]["arguments"]["reset_attention_mask"] = True
    body = {key: value for key, value in described.items() if key not in ("kind", "seal")}
    write_manifest(run, "run", body, "run.json")
    validation = Validation(run, demo.folder / "data" / "phase5", 5)
    plain = Validation(demo.folder / "run", demo.folder / "data" / "phase5", 5)
    for each in (validation, plain):
        each.checkpoints = each.checkpoints[-1:]
    [apart], [together] = validation, plain
    assert apart.loss == pytest.approx(loss_of_documents_alone(demo, 5), abs=1e-5)
    assert abs(apart.loss - together.loss) > 1e-3
    first = sum(phase["steps"] for phase in described["phases"][:-1])
    assert not _documents_apart(validation.phases, first)
    assert _documents_apart(validation.phases, first + 1)


def loss_of_documents_alone(demo, samples) -> float:
    """Mean loss of transformers' own forward of each document of the samples by itself."""
    model = AutoModelForCausalLM.from_pretrained(demo.folder / "model", dtype=torch.float32)
    phase = ConvertedPhase.open(demo.folder / "data" / "phase5")
    stream = torch.from_numpy(stream_of(demo).astype(np.int64))
    there = (len(stream) - 1) // SEQUENCE
    losses = []
    for number in range(samples):
        start = number * there // samples * SEQUENCE
        sample = stream[start : start + SEQUENCE + 1]
        ends = torch.nonzero(sample[:-1] == phase.eod).flatten() + 1
        bounds = sorted({0, *ends.tolist(), SEQUENCE})
        for begin, end in pairwise(bounds):
            with torch.inference_mode():
                logits = model(input_ids=sample[None, begin:end]).logits[0]
            labels = sample[begin + 1 : end + 1]
            losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
    assert len(losses) > samples  # there are samples of several documents
    return torch.cat(losses).mean().item()


def test_every_checkpoint_is_a_point_of_the_curve(demo, validated):
    run, done, rows = validated
    folders = sorted(path.name for path in (run / "checkpoints").glob("iter_*"))
    assert [f"iter_{int(row['iteration']):07d}" for row in rows] == folders
    assert len(rows) > 2
    assert float(rows[0]["loss"]) > float(rows[-1]["loss"])
    (picture,) = run.glob("validation-phase5-*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "not held-out data" in done.stderr  # the toy was trained on it


def test_another_measurement_has_another_name(demo, tmp_path):
    data = demo.folder / "data"
    renamed = shutil.copytree(data / "phase4", tmp_path / "other" / "phase5")
    names = {
        Validation(demo.folder / "run", folder, samples).name
        for folder, samples in ((data / "phase5", 5), (data / "phase5", 6), (renamed, 5))
    }
    assert len(names) == 3
    again = Validation(demo.folder / "run", data / "phase5", 5)
    assert again.name in names
    assert again.name.name.startswith("validation-phase5-")


def test_data_of_another_tokenizer(demo, tmp_path):
    data = shutil.copytree(demo.folder / "data" / "phase5", tmp_path / "data")
    manifest = read_manifest(data, "phase")
    del manifest["seal"], manifest["kind"]
    manifest["tokenizer"]["hash"] = "0" * 64
    write_manifest(data, "phase", manifest)
    with pytest.raises(UserError, match="another tokenizer"):
        Validation(demo.folder / "run", data)
