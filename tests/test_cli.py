"""The command line: quick, and one sentence for what a user can mend."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.models import OptionInfo

from kaiyuan import cli
from kaiyuan.config import load_params
from kaiyuan.errors import UserError
from kaiyuan.files import write_json
from kaiyuan.plan import make_plan
from kaiyuan.train import train

from .conftest import one_line_error, run_kaiyuan

HEAVY = ("torch", "megatron", "transformers", "pyarrow", "matplotlib")


def test_help_and_import_need_nothing_heavy():
    code = (
        "import sys, kaiyuan, kaiyuan.cli\n"
        "try: kaiyuan.cli.app(['--help'])\n"
        f"except SystemExit: print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_takes_less_than_half_a_second():
    def cpu_seconds():
        before = os.times()
        run_kaiyuan("--help")
        after = os.times()
        return (
            after.children_user
            + after.children_system
            - before.children_user
            - before.children_system
        )

    # Processor time, so that what else the machine does makes no difference.
    assert min(cpu_seconds() for _ in range(3)) < 0.5


def test_every_verb_has_an_example():
    listed = run_kaiyuan("--help").stdout
    from kaiyuan.cli import app

    commands = [
        c for group in app.registered_groups for c in group.typer_instance.registered_commands
    ]
    names = [c.name or c.callback.__name__.replace("_", "-") for c in commands]
    assert len(names) >= 19
    for command, name in zip(commands, names, strict=True):
        assert name in listed
        assert f"Example: kaiyuan {name}" in command.callback.__doc__, name


def test_a_wrong_argument_name_gets_the_nearest(tmp_path):
    said = one_line_error("train", "toy", "--data", tmp_path, "--output", tmp_path / "r", "lrr=1")
    assert "Megatron has no argument 'lrr'; did you mean 'lr'?" in said


def test_a_wrong_argument_name_in_a_params_file(make_params, tmp_path):
    folder = make_params(["phase1"])
    path = folder / "model.yaml"
    path.write_text(path.read_text().replace("num_layers", "num_leyers"))
    said = one_line_error("train", folder, "--data", tmp_path, "--output", tmp_path / "run")
    assert "'num_leyers'; did you mean 'num_layers'?" in said


def test_a_value_of_the_wrong_type_is_found_by_megatrons_parser(demo, tmp_path):
    data = demo.folder / "data"
    said = one_line_error(
        *("train", "toy", "--data", data, "--output", tmp_path / "run", "ddp_bucket_size=small")
    )
    assert said.endswith("argument --ddp-bucket-size: invalid int value: 'small'")
    assert said.count("small") == 1  # of all five phases, and with no word of them
    assert "phase1" not in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lr=", "phase1: lr must be"),
        ("lr=nan", "phase1: lr must be a number from 0 on"),
        ("num_layers=abc", "num_layers must be a whole number from 1 on, not 'abc'"),
        ("global_batch_size=0", "global_batch_size must be a whole number from 1 on"),
        ("lr_decay_style=foo", "lr_decay_style must be one of constant, linear"),
        ("num_query_groups=4", "(6) must be a multiple of num_query_groups (4)"),
        ("save_retain_interval=7", "save_retain_interval (7) must be a multiple of save_interval"),
        ("max_loss_jump=-1", "max_loss_jump must be a number above 0, not -1"),
        ("max_position_embeddings=8", "must be at least seq_length (256)"),
        ("train_samples=5", "train_samples is set by kaiyuan itself"),
        ("max_samples=true", "must be a positive whole number"),
        ("=5", "is not of the form KEY=VALUE"),
        *(
            (f"{name}={value}", f"{name} must be a whole number from 1 on")
            for name in (
                *("context_parallel_size", "num_layers_per_virtual_pipeline_stage"),
                *("num_virtual_stages_per_pipeline_rank", "save_retain_interval"),
                *("exit_interval", "recompute_num_layers", "decoder_first_pipeline_num_layers"),
            )
            for value in ("0", "-1", "x", "1.5")
        ),
        ("context_parallel_size=", "context_parallel_size must be a whole number from 1 on"),
        ("recompute_modules=5", "recompute_modules must be a list of names"),
        ("recompute_modules=[[mlp]]", "recompute_modules must be a list of names"),
        ("pipeline_model_parallel_layout=5", "pipeline_model_parallel_layout must be text"),
    ],
)
def test_values_that_make_no_sense_are_found_by_the_plan(change, said):
    # In this process, which has loaded what each of them would load again.
    with pytest.raises(UserError) as caught:
        cli.app(["plan", "toy", change], standalone_mode=False)
    assert said in str(caught.value)


def test_counts_that_need_not_be_given_may_be_taken_back(capsys):
    cli.app(["plan", "toy"], standalone_mode=False)
    plain = capsys.readouterr().out
    optional = ("save_retain_interval=", "exit_interval=", "recompute_num_layers=")
    cli.app(["plan", "toy", *optional], standalone_mode=False)
    assert capsys.readouterr().out == plain


def test_a_name_may_be_written_with_hyphens():
    shown = run_kaiyuan("plan", "toy", "num-layers=6", "--json").stdout
    assert shown == run_kaiyuan("plan", "toy", "num_layers=6", "--json").stdout


def test_the_demo_leaves_what_is_not_its_own(demo, tmp_path):
    (tmp_path / "toy").mkdir()
    for name in ("corpus", "tokenizer", "data", "run"):
        (tmp_path / "toy" / name).symlink_to(demo.folder / name)
    (tmp_path / "toy" / "model").mkdir()
    (tmp_path / "toy" / "model" / "thesis.txt").write_text("precious")
    assert "has no manifest.json" in one_line_error("demo", "--out", tmp_path / "toy")
    assert (tmp_path / "toy" / "model" / "thesis.txt").read_text() == "precious"


def test_checkpoints_of_something_else_are_left_alone(demo, tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "iter_0000010"
    folder.mkdir(parents=True)
    data = demo.folder / "data"
    with pytest.raises(UserError, match=r"has no run\.json"):
        train(make_plan(load_params("toy"), data), data, tmp_path / "run")
    assert folder.exists()


def test_a_missing_tokenizer_file(demo, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(demo.folder / "tokenizer", tokenizer)
    (tokenizer / "merges.txt").unlink()
    source, output = demo.folder / "corpus" / "phase5", tmp_path / "out"
    said = one_line_error(
        "convert",
        "--input",
        source,
        "--output",
        output,
        "--tokenizer",
        tokenizer,
        "--order",
        "rank",
    )
    assert "merges.txt" in said
    assert not output.exists()


def test_a_truncated_bin(demo, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(demo.folder / "data", data)
    path = next((data / "phase4").rglob("*.bin"))
    path.write_bytes(path.read_bytes()[:-2])
    run = tmp_path / "run"
    for verb in (["verify", data / "phase4"], ["train", "toy", "--data", data, "--output", run]):
        assert path.name in one_line_error(*verb)
    assert not run.exists()


# What train says of one: test_preflight.py.
@pytest.mark.parametrize(("verb", "option"), [("demo", "--out"), ("corpus", "--output")])
def test_an_unwritable_output_folder(tmp_path, verb, option):
    # Below a file: not even root can write there.
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "out"
    assert f"cannot write to {output}" in one_line_error(verb, option, output)


def test_an_empty_path_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "the path given for out is empty" in one_line_error("demo", "--out", "")
    assert not list(tmp_path.iterdir())


def test_no_verb_takes_an_empty_path():
    seen = 0
    for group in cli.app.registered_groups:
        for command in group.typer_instance.registered_commands:
            verb = command.callback
            argv = [command.name or verb.__name__]
            for name, parameter in inspect.signature(verb).parameters.items():
                info = parameter.annotation.__metadata__[0]
                option = isinstance(info, OptionInfo)
                if re.search(r"\b(Path|PathOrName)\b", str(parameter.annotation)):
                    seen += 1
                    named = info.param_decls or [f"--{name}".replace("_", "-")] if option else []
                    with pytest.raises(UserError, match=f"given for {name} is empty"):
                        cli.app([*argv, *named, ""], standalone_mode=False)
                if not option:
                    argv.append("x")  # what comes before the next argument
    assert seen > 40


def test_a_folder_in_the_place_of_a_file(tmp_path):
    (tmp_path / "page").mkdir()
    with pytest.raises(UserError, match="page is a folder, where a file is to be written"):
        write_json(tmp_path / "page", {})
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_debug_shows_the_traceback(tmp_path):
    done = run_kaiyuan("--debug", "report", tmp_path, check=1)
    assert "Traceback" in done.stderr and "UserError" in done.stderr


def test_time_of_the_errors():
    """A mistake in a name is found without loading torch."""
    begin = time.perf_counter()
    one_line_error("train", "toy", "--data", "x", "--output", "y", "num_leyers=3")
    assert time.perf_counter() - begin < 5
    assert not Path("y").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("export x --output y --dtype half", "'half' is not one of 'bfloat16', 'float16'"),
        ("train toy --output y", "missing option '--data'; see kaiyuan train --help"),
        ("plan toy --nproc 2", "no such option: --nproc"),
        ("train toy --data x --output y --nproc two", "'--nproc'"),
        ("trian toy", "no such command 'trian'"),
    ],
)
def test_what_the_command_line_does_not_take_is_one_line(command, said):
    assert said in one_line_error(*command.split())
