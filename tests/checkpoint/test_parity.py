"""Exported weights give the logits that Megatron gives."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kaiyuan.checkpoint.describe import describe_checkpoint
from kaiyuan.checkpoint.export import export
from kaiyuan.checkpoint.parity import compare_logits, transformers_logits
from tests.checkpoint.conftest import MODEL, VOCAB

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
