"""The forms in which Megatron may name and store layers, written by torch's own writer."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from kaiyuan.checkpoint.describe import CheckpointInfo
from kaiyuan.checkpoint.export import export
from tests.checkpoint.conftest import MODEL, VOCAB

PER_LAYER = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_proj.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)
FUSED = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
APART = ("input_layernorm.weight", "pre_mlp_layernorm.weight")


def megatron_layers(weights, norms):
    """Return Megatron's tensors of each layer; the joining is written out here once more."""
    heads, groups, size = 6, 2, 20
    layers = []
    for i in range(2):
        w = {
            n.split(".", 3)[3]: t for n, t in weights.items() if n.startswith(f"model.layers.{i}.")
        }
        q, k, v = (w[f"self_attn.{x}_proj.weight"].split(size) for x in "qkv")
        per_group = heads // groups
        rows = [[*q[g * per_group : (g + 1) * per_group], k[g], v[g]] for g in range(groups)]
        fused = (
            torch.cat([row for group in rows for row in group]),
            w["self_attn.o_proj.weight"],
            w["self_attn.q_norm.weight"],
            w["self_attn.k_norm.weight"],
            torch.cat([w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]]),
            w["mlp.down_proj.weight"],
        )
        layer = dict(zip(PER_LAYER, fused, strict=True))
        layer[norms[0]] = w["input_layernorm.weight"]
        layer[norms[1]] = w["post_attention_layernorm.weight"]
        layers.append(layer)
    return layers


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("norms", [FUSED, APART], ids=["fused norms", "norms apart"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "layer by layer"])
def test_every_form_gives_the_same_export(stacked, norms, hf, tokenizer, tmp_path):
    (shard,) = hf.glob("*.safetensors")
    weights = load_file(shard)
    layers = megatron_layers(weights, norms)
    if stacked:
        state = {f"decoder.layers.{n}": torch.stack([x[n] for x in layers]) for n in layers[0]}
    else:
        state = {f"decoder.layers.{i}.{n}": t for i, x in enumerate(layers) for n, t in x.items()}
    padding = torch.full((1024 - VOCAB, MODEL["hidden_size"]), 9.0)
    state |= {
        "embedding.word_embeddings.weight": torch.cat(
            [weights["model.embed_tokens.weight"], padding]
        ),
        "output_layer.weight": torch.cat([weights["lm_head.weight"], padding]),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        # What is not the model's is left aside.
        "optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.full((96,), torch.nan),
        "decoder.layers.mlp.linear_fc1._extra_state": torch.zeros(3),
    }
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    info = CheckpointInfo(tmp_path / "checkpoint", 8, MODEL, VOCAB, tokenizer)
    export(info, tmp_path / "hf", "float32")
    again = tmp_path / "hf" / shard.name
    assert again.read_bytes() == shard.read_bytes()
