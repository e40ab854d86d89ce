"""Memory and time of a step: by hand, against autograd's own saving, and against measurements."""

import json
import os
import subprocess
import sys

import pytest

from kaiyuan.config import load_params
from kaiyuan.errors import UserError
from kaiyuan.estimate import flops_per_token
from kaiyuan.plan import make_plan
from kaiyuan.plan_summary import plan_summary
from kaiyuan.profiling.estimate import (
    Layout,
    Rates,
    memory_table,
    read_calibration,
    saved_by_layer,
    step_time,
)
from kaiyuan.profiling.grid import candidates
from kaiyuan.profiling.sweep import estimated_peak
from tests.conftest import ROOT

GIB = 2**30
MLP = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# docs/performance.md: one H200, bf16, global batch 32. Model, micro-batch, peak GiB, tokens/s.
MEASURED = [
    ("qwen3_1p7b", 1, 43.6, 45_467),
    ("qwen3_1p7b", 2, 52.4, 47_367),
    ("qwen3_1p7b", 4, 70.2, 48_305),
    ("qwen3_1p7b", 8, 105.7, 48_832),
    ("gpt_smoke", 4, 16.5, 290_313),
]

TINY = {
    "num_layers": 4,
    "hidden_size": 8,
    "ffn_hidden_size": 20,
    "num_attention_heads": 2,
    "group_query_attention": True,
    "num_query_groups": 1,
    "kv_channels": 6,
    "qk_layernorm": True,
    "seq_length": 10,
    "vocab_size": 100,
    "make_vocab_size_divisible_by": 1,
    "untie_embeddings_and_output_weights": True,
    "bf16": True,
    "micro_batch_size": 3,
    "global_batch_size": 24,
    "use_distributed_optimizer": True,
}


def model(name, *overrides):
    params = load_params(name, overrides)
    return params.arguments(params.phases[0])


def test_a_tiny_model_by_hand():
    # Queries are 2 x 6 = 12 wide, keys and values 6 each. A layer: 8 x 24 + 12 x 8 + 3 x 8 x 20
    # weights, two norms of 8 and two of 6. Two embeddings of 100 x 8, a norm of 8.
    parameters = 4 * (8 * 24 + 12 * 8 + 480 + 28) + 1600 + 8
    # Kept a token and layer, in elements: input 8, normed 8, projection 24, query and key 18,
    # attention 12, an fp32 of two heads (4 elements), input 8, normed 8, gate and up 40, SwiGLU 20.
    layer = 8 + 8 + 24 + 18 + 12 + 4 + 8 + 8 + 40 + 20
    assert sum(saved_by_layer(TINY).values()) == layer == 150
    # 30 tokens of two bytes. At the peak: logits; input and output of the last norm and a gradient;
    # and the output layer's dummy gradient. (More than the 8 + 40 of a layer's backward.)
    table = memory_table(TINY, data_parallel=2)
    assert table == {
        "parameters": 2 * parameters,
        "gradients": 4 * parameters,
        "optimizer states": 6 * parameters,  # 12 bytes over two ranks
        "activations of the layers": 30 * 2 * 4 * layer,
        "logits": 30 * 2 * 100,
        "gradients and recomputed layers in flight": 30 * 2 * 24 + 2 * 800,
        "workspaces": 2 * 32 * 2**20,
    }


def test_recomputation_by_hand():
    parts = ("activations of the layers", "logits", "gradients and recomputed layers in flight")
    # 60 of 150 elements go; the loss stays the peak: 8880 bytes, where the layer takes 60 again,
    # its output of 8, and gradients of 8 + 40, of 60 bytes each.
    table = memory_table(TINY | MLP, 1)
    assert [table[part] for part in parts] == [60 * 4 * 90, 6000, 60 * 24 + 1600]
    assert memory_table(TINY | MLP | {"recompute_modules": "mlp"}, 1) == table  # the only one
    # The inputs stay alone. A whole layer and the gradients, 150 - 8 + 8 + 48, are the peak now.
    table = memory_table(TINY | FULL, 1)
    assert [table[part] for part in parts] == [60 * 4 * 8, 0, 60 * 198]
    # Two of four layers, in Megatron's other way.
    block = {**FULL, "recompute_method": "block", "recompute_num_layers": 2}
    assert memory_table(TINY | block, 1)[parts[0]] == 60 * (2 * 8 + 2 * 150)


def test_context_parallelism_by_hand():
    # Two ranks with other samples, each of two that share theirs: a token's share of the
    # activations, and optimizer states over all four.
    context = TINY | {"context_parallel_size": 2}
    parameters = memory_table(TINY, 1)["parameters"] / 2
    table = memory_table(context, data_parallel=2)
    assert table["parameters"] == 2 * parameters
    assert table["optimizer states"] == 12 * parameters / 4
    assert table["activations of the layers"] == 15 * 2 * 4 * 150
    # Two stages of two layers: of the 12 / (3 x 2) = 2 micro-batches the first holds both.
    stages = context | {"pipeline_model_parallel_size": 2, "global_batch_size": 12}
    assert memory_table(stages, 2)["activations of the layers"] == 15 * 2 * 2 * 150 * 2
    # Gradients are summed over all that have a copy of the parameters.
    rates = Rates(products=1e30, attention=1e30, idle=0)
    assert step_time(context, 2, rates).rest == pytest.approx(step_time(TINY, 4, rates).rest)


def test_a_plan_and_a_sweep_say_the_same_of_context_parallelism():
    changes = ["context_parallel_size=2", "micro_batch_size=4"]
    params = load_params("qwen3_1p7b", changes)
    planned = plan_summary(make_plan(params), 8)["memory_bytes_a_gpu"]
    [candidate] = candidates(params, {"micro_batch_size": [4]}, 8)
    assert sum(planned.values()) == estimated_peak(candidate)


def test_stages_by_hand():
    # Four stages of a layer: the first holds 4 micro-batches, the last but one 2, the last 1.
    layout = Layout.of(TINY | {"pipeline_model_parallel_size": 4})
    assert [layout.in_flight(stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert layout.in_flight(0, 3) == 3
    # Two stages of two chunks of a layer: 2 x 1 + 1 x 2 forwards before the first backward.
    two = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}
    layout = Layout.of(TINY | two)
    assert layout.chunks == [[1, 1], [1, 1]]
    assert [layout.in_flight(stage, 8) for stage in range(2)] == [5, 3]
    table = memory_table(TINY | two, 1)
    # The first stage is the fuller one: 5 chunks.
    assert table["activations of the layers"] == 60 * 5 * 150
    assert table["logits"] == 0


def test_tensor_parallelism_halves_all_but_norms_and_the_whole_residual_stream():
    a = model("qwen3_1p7b")
    one, eight = memory_table(a, 1), memory_table(a, 8)
    assert eight["optimizer states"] == pytest.approx(one["optimizer states"] / 8)
    assert eight["parameters"] == one["parameters"]
    split = memory_table(a | {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 1)
    for part in ("parameters", "gradients", "optimizer states", "activations of the layers"):
        assert split[part] == pytest.approx(one[part] / 2, rel=1e-3), part
    assert split["logits"] == one["logits"] / 2
    whole = memory_table(a | {"tensor_model_parallel_size": 2}, 1)["activations of the layers"]
    # Four tensors of the hidden size a layer stay whole: half of each more.
    more = 4 * 4096 * 2 * 28 * 4 * 2048 / 2
    assert whole - split["activations of the layers"] == pytest.approx(more)


def test_what_autograd_keeps_alive_is_what_is_counted():
    recompute = [
        {},
        MLP,
        FULL,
        {**FULL, "recompute_num_layers": 2},
        {**FULL, "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    ]
    # With a large vocabulary the loss is the peak, with a small one a layer's backward.
    changes = [
        {"num_layers": 3, "micro_batch_size": 2, "vocab_size": v, **each}
        for v in (151_936, 1_187)
        for each in recompute
    ]
    # The report's fp16 variant has two more norms a layer.
    changes += [{**each, "sandwich_norm": True} for each in changes[6:8]]
    changes = [{**each, "make_vocab_size_divisible_by": 1} for each in changes]
    done = subprocess.run(
        [sys.executable, "-m", "tests.profiling.fake_peak", json.dumps(changes)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    [line] = [x for x in done.stdout.splitlines() if x.startswith("PEAKS ")]
    for each, peak in zip(changes, json.loads(line.removeprefix("PEAKS ")), strict=True):
        table = memory_table(model("qwen3_1p7b") | each, 1)
        fixed = ("parameters", "gradients", "optimizer states", "workspaces")
        estimate = sum(size for part, size in table.items() if part not in fixed)
        assert estimate == pytest.approx(peak, rel=0.02), each


@pytest.mark.parametrize(("name", "micro_batch", "gib", "speed"), MEASURED)
def test_measurements_on_a_gpu(name, micro_batch, gib, speed):
    a = model(name, f"micro_batch_size={micro_batch}", "global_batch_size=32")
    assert sum(memory_table(a, 1).values()) / GIB == pytest.approx(gib, rel=0.005)
    seconds = step_time(a, 1).step(32 // micro_batch)
    assert 32 * 4096 / seconds == pytest.approx(speed, rel=0.02)


@pytest.mark.parametrize("name", ["toy", "gpt_smoke", "qwen3_1p7b"])
def test_the_operations_are_those_of_megatrons_count(name):
    # At one operation a second, where bytes cost nothing: the seconds are the operations.
    rates = Rates(products=1, attention=1, bytes=float("inf"), idle=0)
    a = model(name)
    operations = a["micro_batch_size"] * a["seq_length"] * flops_per_token(a)
    assert step_time(a, 1, rates).micro_batch == pytest.approx(operations, rel=1e-12)
    # Redone in full: the layers' products once more forward, and a quarter of attention.
    products = 2 * sum(
        a["hidden_size"] * width
        for width in (
            2 * a["num_attention_heads"] * a["kv_channels"],
            2 * a["num_query_groups"] * a["kv_channels"],
            3 * a["ffn_hidden_size"],
        )
    )
    scores = 2 * a["num_attention_heads"] * a["kv_channels"] * a["seq_length"] * 3 / 4
    again = a["micro_batch_size"] * a["seq_length"] * a["num_layers"] * (products + scores)
    full = step_time(a | FULL, 1, rates).micro_batch
    assert full - operations == pytest.approx(again, rel=1e-9)


def test_a_calibration_scales_all_times(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text('{"slowdown": 2.5, "device": "some GPU"}')
    a = model("gpt_smoke")
    plain, slow = step_time(a, 1), step_time(a, 1, read_calibration(path))
    assert slow.step(8) == pytest.approx(2.5 * plain.step(8))
    for text in ("", "[]", '{"slowdown": -1}', '{"slowdown": "fast"}'):
        path.write_text(text)
        with pytest.raises(UserError, match="calibration"):
            read_calibration(path)


def test_the_plan_says_hours_by_the_estimate(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text('{"slowdown": 2.0}')
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def hours(*more):
        command = [sys.executable, "-m", "kaiyuan", "plan", "gpt_smoke", "--json", *more]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        said = json.loads(done.stdout)
        assert said["tflops_a_gpu"] == pytest.approx(
            300 * 131_072 * said["flops_a_token"] / said["hours"] / 3600 / 1e12
        )
        return said["hours"]

    assert hours() == pytest.approx(300 * step_time(model("gpt_smoke"), 1).step(8) / 3600)
    assert hours("--calibration", str(path)) == pytest.approx(2 * hours())
