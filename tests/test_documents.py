"""Documents kept apart: positions that begin anew, and attention that stops at the boundary."""

import importlib.util

import numpy as np
import pytest

from kaiyuan.config import load_params
from kaiyuan.data.ends import build_ends
from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.data.samples import OrderedDataset
from kaiyuan.validate import Validation

from .engine import losses, train
from .test_params import ask_megatron

APART = ("reset_attention_mask=true", "reset_position_ids=true")


@pytest.fixture(scope="module")
def phase(demo):
    return ConvertedPhase.open(demo.folder / "data" / "phase4")


def test_no_token_sees_another_document():
    params = load_params("toy", ["num_layers=2", "vocab_size=512", *APART])
    answer = ask_megatron("documents", params.arguments(params.phases[0]))
    assert len(answer["alone"]) == 2 * 256
    np.testing.assert_allclose(answer["together"], answer["alone"], rtol=0, atol=1e-5)
    # Without the option the second document sees the first one.
    difference = np.abs(np.array(answer["mixed"]) - answer["alone"]).reshape(2, 256)
    assert difference[0, :100].max() < 1e-5 < difference[0, 101:].min() * 100
    assert difference[1, 18:].mean() > 1e-3
    if importlib.util.find_spec("triton"):
        fused = ask_megatron("documents", params.arguments(params.phases[0]), TRITON_INTERPRET="1")
        for name, losses_of in answer.items():
            np.testing.assert_allclose(fused[name], losses_of, rtol=0, atol=1e-5)
            assert fused[name] != losses_of  # the kernel rounds in its own way


def test_positions_begin_anew_with_each_document(phase):
    plain = OrderedDataset(phase, 256)
    apart = OrderedDataset(phase, 256, reset_positions=True)
    for i in range(0, len(apart), 7):
        sample = apart[i]
        positions = sample["position_ids"].numpy()
        # A new document begins after each end-of-document token: found here by the token itself.
        ends = np.flatnonzero(sample["tokens"].numpy()[:-1] == phase.eod) + 1
        assert np.flatnonzero(positions == 0).tolist() == [0, *ends.tolist()]
        assert (np.diff(positions)[np.diff(positions) != 1] < 0).all()
        assert plain[i]["position_ids"].tolist() == list(range(256))
        assert (plain[i]["tokens"] == sample["tokens"]).all()


def test_ends_of_documents_are_a_file_of_the_datas_content(phase, tmp_path):
    path = build_ends(phase, tmp_path)
    assert phase.content_hash in path.name
    by_hand = np.cumsum(phase.document_lengths()[phase.order()], dtype=np.int64)
    assert np.array_equal(np.load(path), by_hand)
    written = path.stat().st_mtime_ns
    dataset = OrderedDataset(phase, 256, tmp_path)
    assert path.stat().st_mtime_ns == written
    assert isinstance(dataset.ends, np.memmap)
    assert dataset.documents(5) == OrderedDataset(phase, 256).documents(5)


@pytest.mark.slow
def test_training_with_documents_apart(demo, make_params, tmp_path):
    params, data = make_params(["phase4"]), demo.folder / "data"
    # Nothing is learnt, so that the losses of the steps are those of the checkpoint.
    short = ["phase4.max_samples=16", "phase4.lr=0", "phase4.min_lr=0", "lr_warmup_samples=8"]
    train(tmp_path / "run", data, params, *short, *APART)
    validation = Validation(tmp_path / "run", data / "phase4")
    validation.samples = list(range(16))
    trained = np.mean([float(loss) for loss in losses(tmp_path / "run")])
    [point] = validation
    assert point.loss == pytest.approx(trained, abs=1e-5)
    validation.phases = []  # documents that are not kept apart have another loss
    [mixed] = validation
    assert abs(mixed.loss - trained) > 1e-4
    said = train(tmp_path / "half", data, params, *short, APART[1], check=2)
    assert "must be given together" in said
