"""The variant in fp16 on a GPU: sandwich norm, capped logits, dynamic loss scale.

    pytest -m gpu -s tests/gpu/test_fp16.py

makes the demo's data (about a minute) and trains the toy twice, 24 steps each.
"""

import numpy as np
import pytest
import torch

from tests.engine import losses, records, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None or not torch.cuda.is_available(), reason="CUDA"),
]

VARIANT = ("sandwich_norm=true", "output_logit_cap=30", "phase1.max_samples=192")
FP16 = ("fp16=true", "accumulate_allreduce_grads_in_fp32=true")


@pytest.fixture(scope="module")
def params(make_params):
    return make_params(["phase1"])


def test_fp16_follows_the_curve_of_fp32(demo, params, tmp_path):
    data = demo.folder / "data"
    train(tmp_path / "fp32", data, params, *VARIANT)
    train(tmp_path / "fp16", data, params, *VARIANT, *FP16, "initial_loss_scale=65536")
    single, half = (np.array(losses(tmp_path / name), float) for name in ("fp32", "fp16"))
    distance = abs(half - single).max()
    print(f"\nfp32 {single[0]:.4f} to {single[-1]:.4f}, largest distance {distance:.1e}")
    assert all(row["grad_norm"] for row in records(tmp_path / "fp16"))
    assert single[-1] < single[0] - 1
    assert distance < 0.02


def test_steps_that_overflow_are_skipped_until_the_scale_fits(demo, params, tmp_path):
    run = tmp_path / "run"
    train(run, demo.folder / "data", params, *VARIANT, *FP16, f"initial_loss_scale={2**32}")
    rows = records(run)
    skipped = [not row["grad_norm"] for row in rows]
    assert 0 < sum(skipped) < 24
    # One after another, from the first step on; then it learns.
    assert skipped == sorted(skipped, reverse=True)
    assert all(float(row["learning_rate"]) == 0 for row in rows[: sum(skipped)])
    assert float(rows[-1]["learning_rate"]) > 0
