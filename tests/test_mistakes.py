"""A user's mistake is one sentence that names it, before anything is trained or changed."""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from kaiyuan import cli, runfolder
from kaiyuan.accepted import ACCEPTED, DERIVED, FIXED, MODEL, SHAPE
from kaiyuan.config import OWN_ARGUMENTS, argument_names, load_params, option
from kaiyuan.errors import UserError
from kaiyuan.files import read_manifest
from kaiyuan.live import TrainingView
from kaiyuan.plan import make_plan
from kaiyuan.preflight import _check_converted, _check_packages, preflight
from kaiyuan.rank import ERROR_MARK, STEP_MARK, _reason
from kaiyuan.runfolder import TRACKER, lock, record, recorded, while_recorded
from kaiyuan.train import Nodes, _Heard, _Log, _show, failure_of

from .conftest import ROOT
from .engine import children, start, wait_for
from .test_live import step
from .test_preflight import seal_again


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # Our layers would ignore these.
        ("normalization=LayerNorm", "normalization must be 'RMSNorm', not 'LayerNorm'"),
        ("apply_layernorm_1p=true", "kaiyuan does not take"),
        ("window_size=[8,0]", "window_size is an argument of Megatron that kaiyuan does not take"),
        ("softmax_type=learnable", "kaiyuan does not take"),
        ("num_experts=4", "kaiyuan does not take"),
        ("experimental_attention_variant=dsa", "kaiyuan does not take"),
        ("rampup_batch_size=[8,8,80]", "kaiyuan does not take"),
        # These would make another model than run.json says.
        ("rotary_percent=0.5", "kaiyuan does not take"),
        ("use_rope_scaling=true", "kaiyuan does not take"),
        ("use_mup=true", "kaiyuan does not take"),
        ("swiglu=false", "swiglu must be true, not false"),
        # These would begin anew, or take other data, or another order.
        ("finetune=true", "kaiyuan does not take"),
        ("no_load_optim=true", "kaiyuan does not take"),
        ("ckpt_step=2", "kaiyuan does not take"),
        ("mock_data=true", "kaiyuan does not take"),
        ("dataloader_type=cyclic", "kaiyuan does not take"),
        ("data_path=[x]", "data_path is set by kaiyuan itself"),
        # These fail in the midst of it.
        ("lr=2e-3", r"phase1: min_lr \(0.005\) is above lr \(0.002\): give min_lr, too"),
        ("fp16=true bf16=true", "fp16 and bf16 exclude each other"),
        ("seed=-1", "seed must be a whole number from 1 on, not -1"),
        ("num_workers=-1", "num_workers must be a whole number from 0 on, not -1"),
        ("kv_channels=15", r"the size of a head \(kv_channels, 15\) must be even"),
        ("optimizer=muon", "optimizer must be 'adam', not 'muon'"),
        ("eval_iters=1 eval_interval=1", "eval_iters must be 0, not 1"),
        ("transformer_impl=inference_optimized", "must be one of local, transformer_engine"),
        # The plan has one of each.
        ("phase1.num_layers=3", "num_layers is part of the model, which all phases share"),
        ("phase1.seq_length=128", "seq_length is part of the model"),
        ("phase1.global_batch_size=16", "global_batch_size must be the same in all phases"),
    ],
)
def test_what_would_not_be_followed_is_refused(changes, said):
    with pytest.raises(UserError, match=said):
        load_params("toy", changes.split())


def test_the_lists_hold_names_that_there_are():
    known = {name for name in ACCEPTED | {*DERIVED, *FIXED} if option(name) in argument_names()}
    assert ACCEPTED | {*DERIVED, *FIXED} == known | set(OWN_ARGUMENTS)
    assert ACCEPTED.isdisjoint(DERIVED)
    assert MODEL.issuperset(SHAPE) and ACCEPTED.issuperset(FIXED)


@pytest.mark.parametrize("source", ["README.md", "README.zh.md", "kaiyuan/cli/training.py"])
def test_the_examples_of_readme_and_help_are_taken(source):
    text = (ROOT / source).read_text(encoding="utf-8")
    examples = re.findall(r"\b((?:phase\d\.)?(?:min_)?lr=\d[\de.-]*)", text)
    assert len(examples) > 1
    for example in examples:
        load_params("toy", [example])


def test_what_the_docs_give_as_an_argument_is_taken():
    texts = [path for part in ("docs", "scripts") for path in (ROOT / part).rglob("*.*")]
    texts = [path for path in texts if path.suffix in (".md", ".sh", ".sbatch", ".yaml")]
    given = {
        name
        for path in [*texts, *ROOT.glob("*.md")]
        for name in re.findall(r"\b([a-z0-9_]+)=", path.read_text(encoding="utf-8"))
        if option(name) in argument_names()
    }
    assert {"pretrained_checkpoint", "micro_batch_size", "profile_step_end"} <= given
    assert given - {"trust_remote_code"} <= ACCEPTED  # that one is of transformers


@pytest.fixture
def without_tokens(make_params):
    """Params that assume no numbers of tokens, so that Megatron is not asked about a plan."""
    folder = make_params(["phase1", "phase3"])
    path = folder / "data.yaml"
    phases = yaml.safe_load(path.read_text())["phases"]
    for settings in phases.values():
        del settings["tokens"]
    path.write_text(yaml.safe_dump({"phases": phases}))
    return str(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lr_warmup_samples=100000", "the warm-up of 100000 samples is not shorter than"),
        # Of both phases, and said once.
        ("vocab_size=100", "was made with a vocabulary of 8192 entries, the model has 100"),
    ],
)
def test_what_is_wrong_is_said_without_tokens_to_plan_with(
    demo, without_tokens, tmp_path, change, said
):
    with pytest.raises(UserError) as caught:
        preflight(
            load_params(without_tokens, [change]), demo.folder / "data", tmp_path / "run", Nodes(3)
        )
    assert "2 things stand in the way" in str(caught.value)
    assert said in str(caught.value)
    assert "the global batch of 8 is no multiple of 24" in str(caught.value)


def test_phases_that_are_not_converted_are_named_at_once(tmp_path):
    with pytest.raises(UserError, match="phase1, phase2, phase3, phase4, phase5 are not converted"):
        _check_converted(make_plan(load_params("toy"), tmp_path).phases, tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nnodes", "2"), "must be given with --master, not ''"),
        (("--nnodes", "2", "--master", "host"), "its HOST:PORT must be given"),
        (("--nnodes", "2", "--master", ":29500"), "its HOST:PORT must be given"),
        (("--nnodes", "2", "--master", "host:70000"), "its HOST:PORT must be given"),
        (("--nnodes", "2", "--master", "host:²"), "its HOST:PORT must be given"),
        (
            ("--nnodes", "2", "--master", "host:29500", "--node-rank", "2"),
            "below --nnodes (2), not 2",
        ),
        (("--node-rank", "1"), "below --nnodes (1), not 1"),
    ],
)
@pytest.mark.parametrize("last", ["--check", "--dry-run"])
def test_machines_that_could_not_meet_are_found_before_training(
    demo, tmp_path, options, said, last
):
    argv = ["train", "toy", "--data", str(demo.folder / "data"), "--output", str(tmp_path / "run")]
    with pytest.raises(UserError) as caught:
        cli.app([*argv, "micro_batch_size=4", *options, last], standalone_mode=False)
    assert said in str(caught.value)


def test_machines_meet_at_the_first_one():
    command = Nodes(8, 2, 1, "machine0:29500").command()
    assert command[3:8] == [
        *("--nnodes=2", "--nproc-per-node=8"),
        *("--master-addr=machine0", "--master-port=29500", "--node-rank=1"),
    ]
    Nodes(8, 1, 0, "machine0:29500")  # as a job of one machine gives it, too


def test_layers_that_are_not_installed_are_named():
    with pytest.raises(UserError, match="transformer_engine, but that package is not installed"):
        _check_packages(load_params("toy", ["transformer_impl=transformer_engine"]))
    _check_packages(load_params("toy"))


def test_a_dry_run_is_of_the_phase_that_is_asked_for(demo, tmp_path, capsys):
    argv = ["train", "toy", "--data", str(demo.folder / "data"), "--output", str(tmp_path / "run")]
    cli.app([*argv, "--dry-run"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[::2] == [f"# phase{i}" for i in range(1, 6)]
    cli.app([*argv, "--dry-run", "--phase", "phase3"], standalone_mode=False)
    assert capsys.readouterr().out.splitlines() == lines[4:6]
    with pytest.raises(UserError, match="there is no phase 'phase9'"):
        cli.app([*argv, "--dry-run", "--phase", "phase9"], standalone_mode=False)


@pytest.fixture
def begun(tmp_path):
    """A run that has saved at step 1."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    record(make_plan(load_params("toy")), tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / TRACKER).write_text("1")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("hidden_size=32", "hidden_size was 64 and is now 32"),
        ("sandwich_norm=true", "sandwich_norm was None and is now True"),
        ("vocab_size=9000", "vocab_size was 8192 and is now 9000"),
    ],
)
def test_the_shape_of_a_model_that_has_checkpoints_is_kept(begun, change, said):
    before = recorded(begun)
    with pytest.raises(UserError, match=f"{said}: the shape of the model"):
        record(make_plan(load_params("toy", [change])), begun, allow_change=True)
    assert recorded(begun) == before


@pytest.mark.parametrize(("saves", "rate"), [(True, 6e-3), (False, 5e-3)])
def test_a_change_is_recorded_once_a_checkpoint_was_written_with_it(begun, saves, rate):
    changed = make_plan(load_params("toy", ["lr=6e-3"]))
    with pytest.raises(UserError, match="Megatron fails"):  # noqa: SIM117
        with while_recorded(changed, begun, allow_change=True):
            assert recorded(begun)["phases"][0]["arguments"]["lr"] == 6e-3
            if saves:
                (begun / "checkpoints" / TRACKER).write_text("2")
            raise UserError("Megatron fails")
    assert recorded(begun)["phases"][0]["arguments"]["lr"] == rate
    assert bool(recorded(begun).get("changes")) == saves


def test_a_changed_plan_is_found_before_training(demo, begun, tmp_path):
    params, data = load_params("toy"), tmp_path / "data"
    shutil.copytree(demo.folder / "data", data)
    record(make_plan(params, data), begun, allow_change=True)
    counts = read_manifest(data / "phase3", "phase")["counts"]
    seal_again(data / "phase3", counts=counts | {"rows": 7})
    with pytest.raises(UserError, match=r"phase3 rows was \d+ and is now 7"):
        preflight(params, data, begun, Nodes())
    preflight(params, data, begun, Nodes(), allow_change=True)


def test_ctrl_c_while_it_is_checked_says_that_nothing_is_lost(demo, tmp_path):
    checked = start(tmp_path / "run", demo.folder / "data", "toy", "--check")
    # Megatron's parser, in a process of its own.
    wait_for(lambda: children(checked.pid), checked)
    checked.send_signal(signal.SIGINT)
    assert checked.communicate() == ("", "kaiyuan: interrupted; the same command goes on\n")
    assert checked.returncode == 130


LOG = types.SimpleNamespace(path="the.log", problem="")
FULL = types.SimpleNamespace(path="the.log", problem="No space left on device")


@pytest.mark.parametrize(
    ("code", "asked", "saved", "heard", "log", "said"),
    [
        (0, False, 8, _Heard(step=8), LOG, None),
        (0, True, 5, _Heard(step=5), LOG, None),
        # A signal while the processes start, and one after the last save.
        (-15, True, 3, _Heard(step=0), LOG, None),
        (-15, True, 8, _Heard(step=8), LOG, None),
        (1, True, 8, _Heard(step=8, errors=["connection lost"]), LOG, None),
        (2, True, 3, _Heard(["cannot save"]), LOG, "cannot save"),  # of another machine's steps
        (-9, True, 5, _Heard(step=7), LOG, "stopped before it could save; the last checkpoint is"),
        (-9, False, 5, _Heard(step=7), LOG, "phase1 was killed by SIGKILL; the log is the.log"),
        # Torchrun's code, and what the other ranks say of it.
        (1, False, 5, _Heard(["connection lost"], "SIGBUS", 7), LOG, "was killed by SIGBUS"),
        (1, False, 0, _Heard(["5 layers, not 4"], "SIGTERM"), LOG, "5 layers, not 4"),
        (1, False, 5, _Heard([], "SIGTERM", 7), LOG, "was killed by SIGTERM"),
        (2, False, 5, _Heard(["the data differ"], step=7), LOG, "the data differ (the log is"),
        (2, True, 5, _Heard(["the data differ"], step=7), LOG, "the data differ (the log is"),
        (3, False, 5, _Heard(step=7), LOG, "phase1 failed with exit code 3"),
        (1, False, 5, _Heard(["File too large"], step=7), FULL, "most likely because the disk is"),
        (0, False, 8, _Heard(step=8), FULL, None),
    ],
)
def test_how_a_phase_ended(code, asked, saved, heard, log, said):
    failure = failure_of("phase1", code, asked, saved, heard, log)
    assert failure is None if said is None else said in failure


def test_a_log_that_cannot_be_written_does_not_stop_the_listening(capfd):
    lines = ["much", STEP_MARK + step(1), "more", ERROR_MARK + "a sentence"]
    plan = make_plan(load_params("toy"))
    child = subprocess.Popen(
        [sys.executable, "-c", f"print(*{lines!r}, sep='\\n')"], stdout=subprocess.PIPE, text=True
    )
    heard = _Heard()
    with _Log(Path("/dev/full")) as log:
        _show(child, log, TrainingView(plan.phases[0], plan.steps, Console(quiet=True)), heard)
    assert child.wait() == 0
    assert (log.problem, heard.step) == ("No space left on device", 1)
    assert heard.errors == ["a sentence"]
    assert capfd.readouterr() == ("", "")


HOLDER = (
    "import fcntl, sys, time; handle = open(sys.argv[1], 'w');"
    "fcntl.flock(handle, fcntl.LOCK_EX); print(flush=True); time.sleep(float(sys.argv[2]))"
)


@pytest.mark.parametrize(("seconds", "patience"), [(0.5, 10.0), (10.0, 0.5)])
def test_processes_that_still_end_are_waited_for(tmp_path, monkeypatch, seconds, patience):
    monkeypatch.setattr(runfolder, "_LOCK_SECONDS", patience)
    held = [sys.executable, "-c", HOLDER, tmp_path / ".lock-0", str(seconds)]
    holder = subprocess.Popen(held, stdout=subprocess.PIPE)
    holder.stdout.readline()
    refused = pytest.raises(UserError, match="another process is training")
    said = []
    with contextlib.nullcontext() if seconds < patience else refused:  # noqa: SIM117
        with lock(tmp_path, 0, said.append):
            pass
    holder.kill()
    holder.communicate()
    assert len(said) == 1
    assert "waiting" in said[0]


def test_steps_that_were_all_skipped_are_named():
    # Of Megatron's assertion, which has no words of its own.
    story = "  File optimizer.py, in state_dict\n    assert len(steps) == 1\nAssertionError"
    assert "all steps so far were skipped" in _reason(story)
