"""A loss that is not finite or jumps: the run stops, and its data can be left out."""

import pytest

from kaiyuan.runfolder import latest_step

from .engine import records, samples, train


@pytest.fixture(scope="module")
def params(make_params):
    return make_params(["phase1"])


SHORT = ("phase1.max_samples=32", "lr_warmup_samples=16")


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_not_taken_and_can_be_left_out(demo, params, tmp_path):
    run, data = tmp_path / "run", demo.folder / "data"
    said = train(run, data, params, *SHORT, spoil="nan 2", check=2)
    assert "the loss or a gradient of step 2 is not a finite number" in said
    assert "iterations_to_skip=[2] rerun_mode=disabled" in said
    assert latest_step(run) == 1
    train(run, data, params, *SHORT, "iterations_to_skip=[2]", "rerun_mode=disabled")
    rows = records(run)
    assert [row["iteration"] for row in rows] == ["1", "3", "4"]
    assert [row["samples"] for row in rows] == ["8", "24", "32"]
    # The data goes on where it would have without the step; the schedule is one step late.
    assert len(set(samples(run))) == 32
    assert float(rows[-1]["learning_rate"]) == pytest.approx(5e-3)
    assert float(rows[1]["learning_rate"]) == pytest.approx(5e-3)
    assert float(rows[0]["learning_rate"]) == pytest.approx(2.5e-3)


@pytest.mark.slow
def test_a_loss_that_jumps_ends_the_run_unsaved(demo, params, tmp_path):
    run, data = tmp_path / "run", demo.folder / "data"
    short = ("phase1.max_samples=128", "lr_warmup_samples=16", "save_interval=10")
    said = train(run, data, params, *short, "max_loss_jump=3", spoil="jump 12", check=2)
    assert "the loss of step 12 is" in said
    assert "iterations_to_skip=[12]" in said
    assert latest_step(run) == 10
    train(run, data, params, *short, "max_loss_jump=3", "iterations_to_skip=[12]")
    assert latest_step(run) == 16
