"""Exported weights give the logits that Megatron gives."""

import dataclasses
import inspect
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kaiyuan.checkpoint.describe import describe_checkpoint
from kaiyuan.checkpoint.export import export
from kaiyuan.checkpoint.parity import (
    BOUND,
    Comparison,
    compare,
    compare_logits,
    transformers_logits,
)
from kaiyuan.errors import UserError
from tests.checkpoint.conftest import MODEL, VOCAB
from tests.conftest import run_kaiyuan

HEAD = MODEL["kv_channels"]


def test_export_has_megatrons_logits(expected, hf, tokens):
    assert expected.shape == (1, len(tokens[0]), VOCAB)  # without the 21 rows of padding
    assert abs(transformers_logits(hf, tokens) - expected).max() <= 1e-5


# In the usual run, test_import.py holds an export of such a checkpoint against these bytes.
@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "pp2", "tp2pp2"])
def test_export_of_a_split_training_has_megatrons_logits(layout, trained, tokens, tmp_path):
    info = describe_checkpoint(trained(layout))
    export(info, tmp_path / "hf", "float32")
    assert compare_logits(info, tmp_path / "hf", tokens) <= 1e-5


def test_an_export_of_less_precision_is_the_same_model(info, expected, tokens, tmp_path):
    export(info, tmp_path / "bf16", "bfloat16")
    difference = abs(transformers_logits(tmp_path / "bf16", tokens) - expected).max()
    assert difference > BOUND  # without the rounding of Megatron's weights
    assert "(not the same model: above 1e-04 in fp32)" in str(Comparison(difference, 64, "float32"))
    rounded = compare(info, tmp_path / "bf16", inspect.getsource(os.path)[:300])
    assert rounded.same
    assert "the same model: at most 1e-04 in fp32, with weights rounded to bfloat16" in str(rounded)


@pytest.mark.slow
def test_another_model_is_told_by_the_exit_code(info, hf):
    earlier = info.folder.parent / "iter_0000006"
    done = run_kaiyuan("compare", earlier, hf, check=1)
    assert "not the same model" in done.stdout


def test_what_cannot_be_compared(info, hf, tmp_path):
    with pytest.raises(UserError, match="nothere is not an exported model"):
        compare(info, tmp_path / "nothere", "text")
    with pytest.raises(UserError, match="empty"):
        compare(info, hf, "")
    other = dataclasses.replace(info, model=info.model | {"hidden_size": 64})
    with pytest.raises(UserError, match="is of another model"):
        compare(other, hf, "text")


def swap_rows(weights, name, first, second):
    rows = torch.arange(weights[name].shape[0])
    a, b = (torch.arange(i * HEAD, (i + 1) * HEAD) for i in (first, second))
    rows[a], rows[b] = b, a
    weights[name] = weights[name][rows].contiguous()


ATTENTION = "model.layers.1.self_attn"
MUTATIONS = {
    "query head within its group": lambda w: swap_rows(w, f"{ATTENTION}.q_proj.weight", 0, 1),
    "query head of another group": lambda w: swap_rows(w, f"{ATTENTION}.q_proj.weight", 2, 3),
    "key group": lambda w: swap_rows(w, f"{ATTENTION}.k_proj.weight", 0, 1),
    "value group": lambda w: swap_rows(w, f"{ATTENTION}.v_proj.weight", 0, 1),
    "gate and up": lambda w: w.update(
        {
            "model.layers.0.mlp.gate_proj.weight": w["model.layers.0.mlp.up_proj.weight"].clone(),
            "model.layers.0.mlp.up_proj.weight": w["model.layers.0.mlp.gate_proj.weight"].clone(),
        }
    ),
    "norms of query and key": lambda w: w.update(
        {
            f"{ATTENTION}.q_norm.weight": w[f"{ATTENTION}.k_norm.weight"].clone(),
            f"{ATTENTION}.k_norm.weight": w[f"{ATTENTION}.q_norm.weight"].clone(),
        }
    ),
    "head for embedding": lambda w: w.update(
        {"lm_head.weight": w["model.embed_tokens.weight"].clone()}
    ),
}


def test_each_mutation_of_an_export_is_seen(expected, hf, tokens, tmp_path):
    mutated = shutil.copytree(hf, tmp_path / "hf")
    (shard,) = mutated.glob("*.safetensors")
    original = load_file(shard)
    for what, mutate in MUTATIONS.items():
        weights = dict(original)
        mutate(weights)
        save_file(weights, shard, {"format": "pt"})
        difference = abs(transformers_logits(mutated, tokens) - expected).max()
        # Twenty times what the other tests allow.
        assert difference > 2e-4, what
    save_file(original, shard, {"format": "pt"})
    assert abs(transformers_logits(mutated, tokens) - expected).max() <= 1e-5


@pytest.mark.parametrize(
    ("key", "value"), [("rope_theta", 1_000_000.0), ("rms_norm_eps", 1e-2)], ids=str
)
def test_a_wrong_configuration_is_seen(key, value, expected, hf, tokens, tmp_path):
    mutated = shutil.copytree(hf, tmp_path / "hf")
    config = json.loads((mutated / "config.json").read_text())
    config[key] = value
    if key in config["rope_parameters"]:
        config["rope_parameters"][key] = value
    (mutated / "config.json").write_text(json.dumps(config))
    assert abs(transformers_logits(mutated, tokens) - expected).max() > 2e-4
