"""The shipped params, and what Megatron's own parser says of them."""

import json
import os
import subprocess
import sys

import pytest

from kaiyuan.config import argument_names, load_params, to_argv
from kaiyuan.errors import UserError
from kaiyuan.plan import make_plan

MODELS = ("toy", "gpt_smoke", "qwen3_1p7b", "kaiyuan_2b_fp16")


def ask_megatron(verb, question=None, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron_answers", verb],
        input=json.dumps(question),
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def parsed():
    """Megatron's arguments of every model, phase and tensor-parallel size."""
    questions = [
        (model, phase.name, tp, [*phase.argv, f"--tensor-model-parallel-size={tp}"])
        for model in MODELS
        for phase in make_plan(load_params(model)).phases
        for tp in ((1, 2, 4, 8) if model == "qwen3_1p7b" else (1,))
    ]
    answers = ask_megatron("parse", [question[2:] for question in questions])
    return {question[:3]: answer for question, answer in zip(questions, answers, strict=True)}


def test_megatron_takes_all_shipped_params(parsed):
    assert {key[0] for key in parsed} == set(MODELS)
    assert len(parsed) == 5 + 5 + 5 * 4 + 5
    for (model, phase, _), answer in parsed.items():
        arguments = load_params(model).model
        assert answer["num_layers"] == arguments["num_layers"]
        assert answer["layernorm_epsilon"] == 1e-6
        assert answer["phase_name"] == phase


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_vocabulary_is_not_padded(parsed, tp):
    assert parsed["qwen3_1p7b", "phase1", tp]["padded_vocab_size"] == 151_936


def test_phases_have_the_rates_of_the_report(parsed):
    rates = [parsed["qwen3_1p7b", f"phase{i}", 1] for i in range(1, 6)]
    assert [a["lr"] for a in rates] == [5e-3, 3e-3, 3e-3, 3e-3, 3e-3]
    assert [a["min_lr"] for a in rates] == [5e-3, 3e-3, 3e-3, 3e-3, 6e-4]
    assert [a["lr_decay_style"] for a in rates] == ["constant"] * 4 + ["WSD"]
    assert {a["params_dtype"] for a in rates if "params_dtype" in a} <= {"torch.bfloat16"}


def test_the_variant_is_trained_in_fp16_with_a_dynamic_loss_scale(parsed):
    for phase in range(1, 6):
        a = parsed["kaiyuan_2b_fp16", f"phase{phase}", 1]
        assert (a["fp16"], a["bf16"], a["loss_scale"]) == (True, False, None)
        assert a["accumulate_allreduce_grads_in_fp32"]
        assert (a["sandwich_norm"], a["output_logit_cap"]) == (True, 30)


def test_argument_names_are_those_of_the_parser():
    assert argument_names() == ask_megatron("options")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_layer=3", "did you mean 'num_layers'"),
        ("phase6.lr=1", "there is no phase 'phase6'"),
        ("lr", "not of the form KEY=VALUE"),
        ("phase1.order=shuffled", "the order of phase1 must be one of"),
        ("phase1.tokens=0", "must be a positive whole number"),
        ("eod_mask_loss=true", "the end of a document is learnt"),
        ("train_iters=100", "train_iters is set by kaiyuan itself"),
        ("output_logit_cap=0", "output_logit_cap must be a number above 0, not 0"),
        (
            "phase2.sandwich_norm=true",
            "sandwich_norm is part of the model, which all phases share: it belongs in model.yaml",
        ),
    ],
)
def test_a_wrong_override_is_one_sentence(override, message):
    with pytest.raises(UserError, match=message):
        load_params("toy", [override])


def test_options_that_make_another_model_are_the_models():
    params = load_params("toy", ["sandwich_norm=true", "output_logit_cap=30"])
    assert params.model["sandwich_norm"] is True
    assert params.model["output_logit_cap"] == 30
    argv = to_argv(params.model)
    assert "--sandwich-norm" in argv
    assert argv[argv.index("--output-logit-cap") + 1] == "30"
    with pytest.raises(UserError, match="sandwich_norm needs transformer_impl: local"):
        load_params("kaiyuan_2b_fp16", ["transformer_impl=transformer_engine"])


def test_flags_and_values_are_not_mixed_up():
    assert to_argv({"swiglu": True, "bf16": False, "lr": 0.1, "seed": None}) == [
        "--swiglu",
        "--lr",
        "0.1",
    ]
    with pytest.raises(UserError, match="takes true or false"):
        to_argv({"swiglu": 3})
    with pytest.raises(UserError, match="takes a value"):
        to_argv({"num_layers": True})
