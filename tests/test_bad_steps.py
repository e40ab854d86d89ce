"""A loss that is not finite or jumps: the run stops, and its data can be left out."""

import hashlib

import pytest

from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.data.samples import OrderedDataset
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


@pytest.mark.parametrize(
    "layout",
    [
        (),
        pytest.param(
            ("tensor_model_parallel_size=2", "sequence_parallel=true", "--nproc", 2),
            marks=pytest.mark.slow,
            id="tensor parallel",
        ),
        pytest.param(
            (
                "pipeline_model_parallel_size=2",
                "num_layers_per_virtual_pipeline_stage=1",
                "micro_batch_size=4",
                "--nproc",
                2,
            ),
            marks=pytest.mark.slow,
            id="interleaved pipeline",
        ),
    ],
)
def test_the_last_step_of_a_phase_can_be_left_out(demo, make_params, tmp_path, layout):
    run, data = tmp_path / "run", demo.folder / "data"
    short = ("phase1.max_samples=24", "phase2.max_samples=16", "lr_warmup_samples=8")
    skip = "iterations_to_skip=[2,3]"
    train(run, data, make_params(["phase1", "phase2"]), *short, skip, *layout)
    rows = records(run)
    assert [(row["iteration"], row["phase"]) for row in rows] == [
        ("1", "phase1"),
        ("4", "phase2"),
        ("5", "phase2"),
    ]
    assert [row["samples"] for row in rows] == ["8", "32", "40"]
    expected = [
        hashlib.md5(dataset[i]["tokens"].numpy().tobytes()).hexdigest()
        for name, count in (("phase1", 8), ("phase2", 16))
        for dataset in [OrderedDataset(ConvertedPhase.open(data / name), 256)]
        for i in range(count)
    ]
    assert samples(run) == expected
