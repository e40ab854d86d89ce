"""What stands in the way of a training is named before it starts, all of it at once."""

import json
import shutil

import pytest

from kaiyuan.config import load_params
from kaiyuan.data.inputs import texts_of
from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.data.tokenizer import train_tokenizer
from kaiyuan.errors import UserError
from kaiyuan.estimate import num_parameters
from kaiyuan.files import read_manifest, write_manifest
from kaiyuan.plan import make_plan
from kaiyuan.plan_summary import kept_checkpoints
from kaiyuan.preflight import (
    _check_disk,
    _check_output,
    _check_start,
    _last_step,
    preflight,
    tokenizer_beside,
)
from kaiyuan.runfolder import describe, to_record
from kaiyuan.train import Nodes

# A checkpoint of the toy takes 20 MB: fifty million of them fit nowhere.
VAST = ("vocab_size=151936", "hidden_size=100000", "ffn_hidden_size=1000000", "num_layers=1000")


@pytest.fixture
def data(demo, tmp_path):
    """A copy of the demo's data."""
    return shutil.copytree(demo.folder / "data", tmp_path / "data")


def findings(data, run, *overrides, nodes=None, **more):
    with pytest.raises(UserError) as caught:
        preflight(load_params("toy", overrides), data, run, nodes or Nodes(), **more)
    return str(caught.value)


def test_space_is_asked_for_what_the_command_writes(demo, tmp_path):
    """A checkpoint of a quarter of what is free: two fit, those of all five phases do not."""
    room = shutil.disk_usage(tmp_path).free / 4 / 16  # bytes a parameter, in fp32
    each = [num_parameters(load_params("toy", [f"num_layers={n}"]).model) for n in (2, 3)]
    layers = f"num_layers={int(room / (each[1] - each[0]))}"

    def planned(*overrides):
        return make_plan(load_params("toy", [layers, *overrides]), demo.folder / "data")

    def needed(plan, only=None):
        with pytest.raises(UserError) as caught:
            _check_disk(plan, tmp_path / "run", only)
        return str(caught.value)

    seldom = planned("save_interval=1000", "save_retain_interval=null")
    assert "6 more checkpoints need" in needed(seldom)
    _check_disk(seldom, tmp_path / "run", "phase1")
    often = ("save_interval=1", "save_retain_interval=1")
    steps = planned(*often).phases[0].last_step
    assert f"{steps + 1} more checkpoints need" in needed(planned(*often), "phase1")
    _check_disk(planned(*often, "exit_interval=1"), tmp_path / "run", "phase1")


def test_a_run_is_not_begun_in_the_folder_of_something_else(demo, tmp_path):
    for folder, held in (("data", "phase1"), ("model", "README.md")):
        with pytest.raises(UserError, match=f"holds {held} and no run.json: it is no run"):
            _check_output(demo.folder / folder)
    (tmp_path / "run" / "logs").mkdir(parents=True)  # of a start that failed
    _check_output(tmp_path / "run")
    _check_output(demo.folder / "run")


def test_what_would_fail_later_is_said_before(demo, tmp_path):
    run = demo.folder / "run"
    options = (f"pretrained_checkpoint={run}", "global_batch_size=12", "micro_batch_size=4")
    three = ("tensor_model_parallel_size=3", *options)
    said = findings(demo.folder / "data", tmp_path / "new", *three, nodes=Nodes(3))
    assert f"is the folder of a run: give {run}/checkpoints" in said
    assert "num_query_groups (2) must be a multiple or divisor of tensor" in said


def test_the_tokenizer_is_found_beside_the_data(demo, tmp_path):
    plan = make_plan(load_params("toy"), demo.folder / "data")
    assert tokenizer_beside(plan, demo.folder / "data") == demo.folder / "tokenizer"
    # Another one, which lies nearer, is not taken for it.
    data = tmp_path / "data"
    data.mkdir()
    shutil.copytree(demo.folder / "tokenizer", tmp_path / "tokenizer")
    train_tokenizer(texts_of([demo.folder / "corpus" / "phase5"]), data / "tokenizer", 300)
    assert tokenizer_beside(plan, data) == tmp_path / "tokenizer"
    # A run that goes on without it keeps the one that was noted.
    first = describe(plan, demo.folder / "tokenizer")
    write_manifest(tmp_path / "run", "run", first, "run.json")
    assert to_record(plan, tmp_path / "run")["tokenizer"] == str(demo.folder / "tokenizer")


def test_the_step_at_which_a_command_ends(demo):
    def ends(*overrides, only=None, done=0):
        plan = make_plan(load_params("toy", overrides), demo.folder / "data")
        last = _last_step(plan, only, done)
        return last, [step for step in kept_checkpoints(plan, last) if step > done]

    short = [f"phase{n}.max_samples=80" for n in range(1, 6)]  # ten steps each
    retain = [*short, "save_interval=4", "save_retain_interval=8"]
    assert ends(*retain) == (50, [8, 16, 24, 32, 40, 48, 50])
    assert ends(*retain, only="phase2", done=10) == (20, [16, 20])
    assert ends(*retain, only="phase1") == (10, [8, 10])
    assert ends(*retain, "exit_interval=7") == (7, [7])
    assert ends(*retain, "exit_interval=7", done=7) == (14, [8, 14])
    # The loop of a phase ends before it looks at exit_interval, and the next phase begins.
    assert ends(*retain, "exit_interval=10") == (50, [8, 16, 24, 32, 40, 48, 50])


def seal_again(folder, **changes):
    body = read_manifest(folder, "phase") | changes
    write_manifest(folder, "phase", {k: v for k, v in body.items() if k not in ("kind", "seal")})


def steps_trained(demo):
    return len((demo.folder / "run" / "loss.csv").read_text().splitlines()) - 1


def test_everything_is_found_at_once(data, tmp_path):
    phase = ConvertedPhase.open(data / "phase2")
    binary = phase.shards[0].with_suffix(".bin")
    binary.write_bytes(binary.read_bytes()[:-4])
    order = read_manifest(data / "phase4", "phase")["order"]
    seal_again(data / "phase4", order=order | {"kind": "rank-desc"})
    # Below a file: not even root can write there.
    (tmp_path / "file").write_text("")
    run = tmp_path / "file" / "run"
    said = findings(
        data,
        run,
        "micro_batch_size=3",
        "log_memory_interval=7",
        "phase5.rerun_mode=sideways",
        *VAST,
        tokenizer=tmp_path / "nothing",
    )
    assert said.startswith("7 things stand in the way")
    for part in (
        f"{binary.name} has",
        "phase4 was converted in rank-desc order",
        "the global batch of 8 is no multiple of 3",
        "nothing is not a whole tokenizer",
        f"cannot write to {run}",
        "more checkpoints need",
        " left: raise save_interval",
        # Of an assertion that says nothing, its line.
        "phase1, phase2, phase3, phase4: Megatron refuses this combination of arguments: assert",
        "phase5: Megatron does not take these arguments: argument --rerun-mode",
    ):
        assert said.count(part) == 1, said
    # Megatron says of the batch what is said already.
    assert "eval_micro_batch_size" not in said


def test_a_flipped_byte_is_found_by_hashes_only(demo, data):
    binary = ConvertedPhase.open(data / "phase3").shards[0].with_suffix(".bin")
    content = bytearray(binary.read_bytes())
    content[100] ^= 1
    binary.write_bytes(content)
    # Begun with these arguments, which need not be checked again.
    run = demo.folder / "run"
    preflight(load_params("toy"), data, run, Nodes())
    assert binary.name in findings(data, run, hashes=True)


def test_tokenizers_must_be_one(demo, data, tmp_path):
    run = demo.folder / "run"  # begun with these arguments
    train_tokenizer(texts_of([demo.folder / "corpus"]), tmp_path / "other", 1000)
    said = findings(data, run, tokenizer=tmp_path / "other")
    assert "phase1, phase2, phase3, phase4, phase5 were not converted with" in said
    manifest = read_manifest(data / "phase2", "phase")
    seal_again(data / "phase2", eod={**manifest["eod"], "id": 5})
    assert "ending with 5" in findings(data, run)


@pytest.mark.slow
def test_a_missing_phase_and_too_few_gpus(data, tmp_path, monkeypatch):
    shutil.rmtree(data / "phase5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    said = findings(data, tmp_path / "run", nodes=Nodes(8))
    assert "phase5 is not converted yet" in said
    assert "8 processes are asked for, but there are 2 GPUs here" in said
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    preflight(load_params("toy"), data, tmp_path / "run", Nodes(), only="phase1")


def test_the_command_says_it_in_one_line(demo, tmp_path, kaiyuan):
    argv = ["train", "toy", "--data", demo.folder / "data", "--check"]
    sound = ["--output", tmp_path / "run", "--tokenizer", demo.folder / "tokenizer"]
    assert kaiyuan(*argv, *sound, "--verify-data").stdout == (
        f"ready to train toy: {steps_trained(demo)} steps in all\n"
    )
    assert not (tmp_path / "run").exists()
    bad = ["--output", demo.folder / "run", "--tokenizer", tmp_path, "--nproc", 3]
    done = kaiyuan(*argv, *bad, check=2)
    assert len(done.stderr.splitlines()) == 1
    assert "2 things stand in the way: (1) " in done.stderr
    assert json.loads(kaiyuan("plan", "toy", "--json").stdout)["steps"] > 0


def test_weights_to_begin_with_must_be_of_the_same_shape(demo, tmp_path):
    start = f"pretrained_checkpoint={demo.folder / 'run' / 'checkpoints'}"
    another = make_plan(load_params("toy", [start, "hidden_size=128"]))
    _check_start(make_plan(load_params("toy", [start])), tmp_path)
    with pytest.raises(UserError, match=r"of another model: .* is \[8192, 64\] where .*128"):
        _check_start(another, tmp_path)
    _check_start(another, demo.folder / "run")  # which goes on from its own checkpoint
    nothing = make_plan(load_params("toy", [f"pretrained_checkpoint={tmp_path}"]))
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        _check_start(nothing, tmp_path)
