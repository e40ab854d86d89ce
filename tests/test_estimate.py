"""Parameters and operations against hand-worked figures, Megatron and torch."""

import pytest

from kaiyuan.config import load_params
from kaiyuan.estimate import (
    flops_per_token,
    num_parameters,
    padded_vocab_size,
    parameter_table,
)
from tests.test_params import ask_megatron


def model(name, *overrides):
    params = load_params(name, overrides)
    return params.arguments(params.phases[0])


def test_parameters_of_the_main_model_are_those_of_the_report():
    table = parameter_table(model("qwen3_1p7b"))
    embeddings = table["token embedding"] + table["output layer"]
    assert embeddings == 622_329_856
    assert sum(table.values()) - embeddings == 1_409_410_048
    assert num_parameters(model("qwen3_1p7b")) == 2_031_739_904


def test_parameters_of_the_fp16_variant():
    # Two more norms of 2,048 in each of 28 layers.
    more = num_parameters(model("kaiyuan_2b_fp16")) - num_parameters(model("qwen3_1p7b"))
    assert more == 28 * 2 * 2048 == 114_688
    assert num_parameters(model("kaiyuan_2b_fp16")) == 2_031_854_592


def test_parameters_of_the_smoke_model():
    # By hand, a layer: queries and output 2 x 768 x 768, keys and values 2 x 768 x 384,
    # MLP 3 x 768 x 3072, norms 2 x 768 + 2 x 96.
    layer = 2 * 768 * 768 + 2 * 768 * 384 + 3 * 768 * 3072 + 2 * 768 + 2 * 96
    assert num_parameters(model("gpt_smoke")) == 2 * 151_936 * 768 + 12 * layer + 768


@pytest.mark.parametrize(
    ("divisor", "tp", "rows"),
    [(128, 1, 151_680), (128, 2, 151_808), (128, 4, 152_064), (128, 8, 152_576)]
    + [(1187, tp, 151_936) for tp in (1, 2, 4, 8)],
)
def test_padding_of_the_vocabulary(divisor, tp, rows):
    # 151,669 entries are what the published tokenizer has.
    arguments = {
        "vocab_size": 151_669,
        "make_vocab_size_divisible_by": divisor,
        "tensor_model_parallel_size": tp,
    }
    assert padded_vocab_size(arguments) == rows


def test_operations_are_those_that_torch_and_megatron_count():
    sizes = ["num_layers=2", "vocab_size=1024"]
    a = model("toy", *sizes)
    answer = ask_megatron("flops", {k: a[k] for k in sorted(a)})
    assert answer["parameters"] == num_parameters(a)
    assert answer["megatron_count"] == flops_per_token(a)
    # Torch counts the score matrix as full; we and Megatron count half of it.
    queries = a["num_attention_heads"] * a["kv_channels"]
    other_half = 6 * a["num_layers"] * queries * a["seq_length"]
    assert answer["torch_count"] == flops_per_token(a) + other_half
