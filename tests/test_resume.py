"""Interrupted runs end as if they had not been: the same losses, the same samples, in order."""

import contextlib
import dataclasses
import json
import os
import pickle
import resource
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from kaiyuan.accepted import ACCEPTED, FIXED, MODEL
from kaiyuan.config import argument_names, load_params, option
from kaiyuan.data.samples import OrderedDataset
from kaiyuan.errors import UserError
from kaiyuan.files import write_manifest
from kaiyuan.plan import make_plan
from kaiyuan.profiling.grid import GROUPS
from kaiyuan.runfolder import (
    RUN_FILE,
    TRACKER,
    latest_step,
    record,
    recorded,
    settle_checkpoints,
    to_record,
)

from .engine import losses, records, samples, start, steps_done, train, wait_for

SHORT = (
    "phase1.max_samples=48",
    "phase3.max_samples=32",
    "save_interval=2",
    "lr_warmup_samples=64",  # beyond the first phase
)
STEPS = 10


@pytest.fixture(scope="module")
def params(make_params):
    return make_params(["phase1", "phase3"])


@pytest.fixture(scope="module")
def data(demo):
    return demo.folder / "data"


@pytest.fixture(scope="module")
def uninterrupted(params, data, tmp_path_factory):
    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(run, data, params, *SHORT)
    assert len(losses(run)) == STEPS
    return run


def smaller_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))


@pytest.mark.slow
def test_a_run_that_is_interrupted_in_every_way(params, data, uninterrupted, tmp_path):
    run = tmp_path / "run"
    # SIGTERM in the midst of phase 1, at a step that is not due for saving, to every process, as
    # Slurm sends it.
    process = start(run, data, params, *SHORT)
    wait_for(lambda: steps_done(run) >= 3, process)
    for each in sessions_of(ranks_of(run)):
        os.kill(each, signal.SIGTERM)
    out, error = process.communicate()
    assert process.returncode == 75, error
    stopped = latest_step(run)
    assert f"stopped and saved at step {stopped}" in out
    assert 3 <= stopped < STEPS
    # SIGTERM while the processes start: nothing is lost, so it is no failure.
    process = start(run, data, params, *SHORT)
    wait_for(lambda: len(ranks_of(run)) > 1, process)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate()
    assert process.returncode == 75, error
    assert latest_step(run) == stopped
    # The disk is full when the next save is due.
    said = train(run, data, params, *SHORT, preexec_fn=smaller_files, check=2)
    assert "a checkpoint could not be written" in said
    assert latest_step(run) == stopped
    # Killed while a checkpoint of phase 3 is written.
    process = start(run, data, params, *SHORT)
    unfinished = run / "checkpoints" / "iter_0000008"
    wait_for(unfinished.exists, process)
    os.killpg(process.pid, signal.SIGKILL)
    for child in ranks_of(run):
        os.killpg(child, signal.SIGKILL)
    process.communicate()
    assert not (unfinished / "metadata.json").exists()
    said = train(run, data, params, *SHORT)
    assert "removed iter_0000008, whose save was cut short" in said
    assert losses(run) == losses(uninterrupted)
    assert samples(run) == samples(uninterrupted)


def ranks_of(run):
    """Return the processes that hold the run's lock."""
    holders = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if run / ".lock-0" in {handle.readlink() for handle in (process / "fd").iterdir()}:
                holders.append(int(process.name))
    return holders


def sessions_of(ranks):
    """Return all processes of the sessions of some processes."""
    sessions = {os.getsid(rank) for rank in ranks}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(process.name)) in sessions:
                found.append(int(process.name))
    return found


def test_each_sample_is_trained_on_once_in_the_order_of_the_data(params, data, uninterrupted):
    import hashlib

    expected = []
    for phase in make_plan(load_params(str(params), SHORT), data).phases:
        dataset = OrderedDataset(phase.data, 256)
        rows = [dataset[i]["tokens"].numpy().tobytes() for i in range(phase.samples)]
        expected += [hashlib.md5(row).hexdigest() for row in rows]
    assert samples(uninterrupted) == expected
    assert max(Counter(expected).values()) == 1


def test_the_plan_agrees_with_what_training_recorded(params, data, uninterrupted):
    plan = make_plan(load_params(str(params), SHORT), data)
    rows = records(uninterrupted)
    assert plan.steps == len(rows)
    done = 0
    for phase in plan.phases:
        for row in rows[phase.first_step : phase.last_step]:
            done += 1
            assert row["phase"] == phase.name
            assert int(row["phase_samples"]) == (done - phase.first_step) * 8
            # Recorded is the rate after the step, with which the next one of the phase is taken.
            assert float(row["learning_rate"]) == pytest.approx(phase.learning_rate(done), rel=1e-7)
    log = (uninterrupted / "logs" / "phase1-node0.log").read_text()
    assert "model parallel rank (0, 0, 0): 1249984" in log
    events = list((uninterrupted / "tensorboard").iterdir())
    assert any(event.name.startswith("events.out.tfevents") for event in events)


@pytest.fixture
def copy(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("text", ["", "9", "1000", "nonsense", "²", None])
def test_a_wrong_tracker_is_mended(copy, text):
    tracker = copy / "checkpoints" / TRACKER
    tracker.unlink() if text is None else tracker.write_text(text)
    assert settle_checkpoints(copy) == ["going on from step 10, the last complete checkpoint"]
    assert latest_step(copy) == 10


def test_an_earlier_checkpoint_may_be_chosen(copy):
    (copy / "checkpoints" / TRACKER).write_text("6")
    assert settle_checkpoints(copy) == []
    assert latest_step(copy) == 6


def test_a_truncated_checkpoint_is_not_chosen(copy):
    part = next((copy / "checkpoints" / "iter_0000010").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1000])
    said = settle_checkpoints(copy)
    assert "is incomplete" in said[0]
    assert latest_step(copy) == 8


def test_what_lies_beside_a_checkpoint_is_left_alone(copy):
    names = ("iter_0000010-hf-0123456789ab", "iter_²")
    for name in names:
        (copy / "checkpoints" / name).mkdir()
    assert settle_checkpoints(copy) == []
    assert all((copy / "checkpoints" / name).is_dir() for name in names)


def test_a_checkpoint_without_a_part_of_the_model_is_not_taken_for_a_full_disk(params, data, copy):
    index = copy / "checkpoints" / "iter_0000010" / ".metadata"
    content = pickle.loads(index.read_bytes())
    del content.state_dict_metadata["decoder.final_layernorm._extra_state/shard_0_1"]
    index.write_bytes(pickle.dumps(content))
    more = ("phase3.max_samples=40", "--allow-change")  # a step is left to do
    short = [text for text in SHORT if not text.startswith("phase3")]
    said = train(copy, data, params, *short, *more, check=2)
    assert "the checkpoint could not be loaded: RuntimeError: Missing key" in said
    assert "decoder.final_layernorm._extra_state" in said


def test_without_a_complete_checkpoint_it_starts_anew(copy):
    for folder in (copy / "checkpoints").glob("iter_*"):
        (folder / "metadata.json").unlink()
    assert settle_checkpoints(copy)[-1].startswith("there is no complete checkpoint")
    assert latest_step(copy) == 0


def test_a_changed_schedule_is_refused_with_both_values(params, data, copy):
    changed = make_plan(load_params(str(params), [*SHORT, "phase3.max_samples=40"]), data)
    with pytest.raises(UserError, match=r"phase3 samples was 32 and is now 40.*--allow-change"):
        record(changed, copy)
    record(changed, copy, allow_change=True)
    changes = recorded(copy)["changes"]
    assert [c.split(": ", 1)[0] for c in changes] == ["from step 10 on"]
    record(changed, copy)  # now it is the plan of the run


@pytest.mark.slow
def test_a_schedule_that_is_changed_on_purpose_is_the_one_that_runs(params, data, copy):
    # One step more, at another rate; and on a machine without make or a compiler.
    more = ("phase3.max_samples=40", "phase3.lr=1e-3", "phase3.min_lr=1e-3", "--allow-change")
    short = [text for text in SHORT if not text.startswith("phase3")]
    before = records(copy)
    train(copy, data, params, *short, *more, environment={"PATH": "/nowhere"})
    rows = records(copy)
    assert rows[:STEPS] == before
    # As the optimizer's parameter groups have it after the step.
    assert [float(row["learning_rate"]) for row in rows[STEPS:]] == [1e-3]


def test_another_length_of_the_decay_is_refused(tmp_path):
    # Megatron does not keep it in a checkpoint and would go on with another rate.
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    record(make_plan(load_params("toy")), run)
    (run / "checkpoints" / TRACKER).write_text("1")
    changed = make_plan(load_params("toy", ["phase5.lr_wsd_decay_samples=80"]))
    with pytest.raises(UserError, match=r"phase5 arguments lr_wsd_decay_samples was \d+ and"):
        record(changed, run)


# What is computed, on which samples, in how many steps. All else says how, and where.
TRAINED = {
    *MODEL,
    *FIXED,
    *("bf16", "fp16", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window"),
    *("hysteresis", "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16"),
    *("use_cpu_initialization", "pretrained_checkpoint", "seed", "global_batch_size"),
    *("adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad"),
    *("lr", "min_lr", "lr_warmup_samples", "lr_decay_style", "lr_decay_samples"),
    *("lr_wsd_decay_style", "lr_wsd_decay_samples", "start_weight_decay", "end_weight_decay"),
    *("weight_decay_incr_style", "reset_attention_mask", "reset_position_ids", "eod_mask_loss"),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of the toy's plan at step 1, and that plan."""
    run, plan = tmp_path_factory.mktemp("begun") / "run", make_plan(load_params("toy"))
    (run / "checkpoints").mkdir(parents=True)
    record(plan, run)
    (run / "checkpoints" / TRACKER).write_text("1")
    return run, plan


@pytest.mark.parametrize("name", sorted(ACCEPTED))
def test_all_that_does_not_change_what_is_trained_may_change(begun, name):
    run, plan = begun
    *before, last = plan.phases
    is_flag = name == "sandwich_norm" or argument_names().get(option(name)) == "flag"
    value = not last.arguments.get(name) if is_flag else "another"
    last = dataclasses.replace(last, arguments={**last.arguments, name: value})
    changed = dataclasses.replace(plan, phases=(*before, last))
    if name in TRAINED:
        with pytest.raises(UserError, match=rf"phase5 arguments {name} was .* and is now"):
            to_record(changed, run)
    else:
        to_record(changed, run)


def test_a_run_goes_on_with_what_the_documentation_offers(params, data, copy):
    layouts = [
        ["context_parallel_size=2"],
        ["pipeline_model_parallel_size=2", "pipeline_model_parallel_layout=Et*2|t*2L"],
        ["profile=true", "use_pytorch_profiler=true", "profile_step_end=102", "profile_ranks=[0]"],
        ["distributed_timeout_minutes=10"],
        [f"{k}={json.dumps(v)}" for k, v in GROUPS["recompute"]["mlp"].items()],
        [f"{k}={json.dumps(v)}" for k, v in GROUPS["recompute"]["full"].items()],
    ]
    for changes in layouts:
        record(make_plan(load_params(str(params), [*SHORT, *changes]), data), copy)
    # A version before this one noted what may change, too.
    body = {k: v for k, v in recorded(copy).items() if k not in ("kind", "seal")}
    body["phases"][0]["arguments"]["context_parallel_size"] = 2
    write_manifest(copy, "run", body, RUN_FILE)
    record(make_plan(load_params(str(params), SHORT), data), copy)


def test_the_layout_may_change_and_a_phase_may_get_its_data_later(params, data, tmp_path, copy):
    layout = ["micro_batch_size=4", "tensor_model_parallel_size=2", "log_interval=1"]
    record(make_plan(load_params(str(params), [*SHORT, *layout]), data), copy)
    # The second phase is not converted yet.
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "phase1").symlink_to(data / "phase1")
    plan = make_plan(load_params(str(params), ["phase3.tokens=50000"]), tmp_path / "some")
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    (tmp_path / "begun" / "checkpoints" / TRACKER).write_text("1")
    record(plan, tmp_path / "begun")
    record(make_plan(load_params(str(params)), data), tmp_path / "begun")


@pytest.mark.slow
@pytest.mark.parametrize("phase", [1, 2, 3, 4, 5])
def test_sigterm_in_any_phase(demo, data, tmp_path_factory, tmp_path, phase, five_phases):
    reference, short = five_phases
    run = tmp_path / "run"
    process = start(run, data, "toy", *short)
    wait_for(lambda: steps_done(run) >= 4 * (phase - 1) + 1 + phase % 3, process)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 75
    train(run, data, "toy", *short)
    assert losses(run) == losses(reference)
    assert samples(run) == samples(reference)


@pytest.fixture(scope="module")
def five_phases(data, tmp_path_factory):
    run = tmp_path_factory.mktemp("five") / "run"
    short = [f"phase{i}.max_samples=32" for i in range(1, 6)]
    short.append("lr_warmup_samples=40")
    train(run, data, "toy", *short)
    return run, short
