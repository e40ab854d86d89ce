import pytest

from kaiyuan.config import _load, load_params, option, to_argv
from kaiyuan.errors import UserError


def test_arguments_become_megatrons_command_line():
    arguments = {"num_layers": 2, "swiglu": True, "bf16": False, "lr": 1e-3, "save": None}
    assert to_argv(arguments) == ["--num-layers", "2", "--swiglu", "--lr", "0.001"]
    assert option("make_vocab_size_divisible_by") == "--make-vocab-size-divisible-by"
    assert to_argv({"split": [98, 1, 1]}) == ["--split", "98", "1", "1"]


@pytest.mark.parametrize(("key", "value"), [("swiglu", 3), ("num_layers", True)])
def test_flags_and_values_are_told_apart(key, value):
    with pytest.raises(UserError, match=f"the argument {key} takes"):
        to_argv({key: value})


def test_overrides_reach_all_phases_or_one():
    params = load_params("toy", ["lr=0.5", "phase5.min_lr=0.25", "max_samples=8", "num_layers=3"])
    by_name = {phase.name: phase for phase in params.phases}
    rates = {name: params.arguments(phase)["lr"] for name, phase in by_name.items()}
    assert set(rates.values()) == {0.5}  # phase1's own rate too
    assert params.arguments(by_name["phase5"])["min_lr"] == 0.25
    assert params.arguments(by_name["phase4"])["min_lr"] == 3e-3
    assert {phase.max_samples for phase in params.phases} == {8}
    assert params.model["num_layers"] == 3


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("lr", "not of the form KEY=VALUE"),
        ("phase9.lr=1", "there is no phase 'phase9'"),
        ("num_layer=1", "did you mean 'num_layers'"),
        ("order=random", "must be one of file, rank, rank-desc"),
        ("max_samples=-1", "positive whole number"),
        ("lr=[1", "the value of lr is not valid YAML"),
    ],
)
def test_mistakes_are_named(override, said):
    with pytest.raises(UserError, match=said):
        load_params("toy", [override])


def test_a_rate_may_be_written_in_any_way():
    for text in ("6e-3", "6.0e-3", "0.006"):
        assert load_params("toy", [f"lr={text}"]).hparams["lr"] == 0.006


def test_an_unknown_model_lists_those_that_there_are():
    with pytest.raises(UserError, match=r"gpt_smoke, .*qwen3_1p7b, toy"):
        load_params("qwen4")


def test_a_folder_of_a_models_name_does_not_hide_the_model(tmp_path, monkeypatch):
    (tmp_path / "toy").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_params("toy").model["num_layers"] == 4


def test_a_key_that_is_given_twice(make_params):
    folder = make_params(["phase1"])
    path = folder / "model.yaml"
    plain = path.read_text()
    path.write_text(f"{plain}num_layers: 5\n")
    with pytest.raises(UserError, match=r"model.yaml is not valid YAML: num_layers stands twice"):
        load_params(str(folder))
    path.write_text(f"{plain}weight_decay: 0.2\n")
    with pytest.raises(UserError, match=r"weight_decay stands in model.yaml and in hparams.yaml"):
        load_params(str(folder))
    # A merged key may be changed, as YAML has it.
    path.write_text(plain)
    assert _load("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}", "it")["b"] == {"x": 3, "y": 2}


def test_a_file_that_is_no_yaml(make_params):
    folder = make_params(["phase1"])
    (folder / "hparams.yaml").write_text("a: [1,\nb: 2")
    with pytest.raises(UserError, match=r"hparams.yaml is not valid YAML"):
        load_params(str(folder))
