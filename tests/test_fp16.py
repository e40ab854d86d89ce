"""The variant in fp16: sandwich norm, capped logits, dynamic loss scale.

On a CPU it runs under -m slow, on a GPU under -m gpu as well:

    pytest -m gpu -s tests/test_fp16.py
"""

import shutil

import numpy as np
import pytest
import torch

from .engine import losses, records, train

pytestmark = [pytest.mark.slow, pytest.mark.gpu]

# Small, because a CPU multiplies slowly in fp16: 24 steps of 512 tokens.
SMALL = ("num_layers=2", "seq_length=64", "max_position_embeddings=64", "phase1.max_samples=192")
VARIANT = ("sandwich_norm=true", "output_logit_cap=30", *SMALL)
FP16 = ("fp16=true", "accumulate_allreduce_grads_in_fp32=true")


@pytest.fixture(scope="module")
def params(make_params):
    return make_params(["phase1"])


def test_fp16_follows_the_curve_of_fp32_and_goes_on(demo, params, tmp_path):
    data = demo.folder / "data"
    half = (*VARIANT, *FP16, "initial_loss_scale=65536", "save_interval=16")
    train(tmp_path / "fp32", data, params, *VARIANT)
    train(tmp_path / "fp16", data, params, *half)
    single, mixed = (np.array(losses(tmp_path / name), float) for name in ("fp32", "fp16"))
    distance = abs(mixed - single).max()
    print(f"\nfp32 {single[0]:.4f} to {single[-1]:.4f}, largest distance {distance:.1e}")
    assert all(row["grad_norm"] for row in records(tmp_path / "fp16"))
    assert single[-1] < single[0] - 1
    assert 0 < distance < 0.05
    # From the checkpoint of step 16 the same steps are done again.
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "fp16", again)
    (again / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("16")
    train(again, data, params, *half)
    np.testing.assert_allclose(np.array(losses(again), float), mixed, rtol=0, atol=1e-3)
    if not torch.cuda.is_available():
        assert losses(again) == losses(tmp_path / "fp16")


def test_steps_that_overflow_are_skipped_until_the_scale_fits(demo, params, tmp_path):
    run = tmp_path / "run"
    train(run, demo.folder / "data", params, *VARIANT, *FP16, f"initial_loss_scale={2**32}")
    rows = records(run)
    taken = np.array([bool(row["grad_norm"]) for row in rows])
    print(f"\n{sum(~taken)} steps were skipped")
    assert not taken[0]
    assert sum(taken) >= 4
    # The warm-up of 10 steps counts those that were taken; what was taken is learnt from.
    rates = 5e-3 * np.minimum(taken.cumsum() / 10, 1)
    assert [float(row["learning_rate"]) for row in rows] == pytest.approx(rates)
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) - 0.05
