"""The name table, against shapes and orders worked out by hand."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kaiyuan.checkpoint.names import LAYER_RULES, Sizes, entries

# 4 query heads in 2 groups, heads of 1, so that a row is a head.
SIZES = Sizes(layers=1, hidden=3, ffn=2, heads=4, groups=2, head_dim=1, vocab=5)


def rule(megatron):
    (found,) = [e for e in entries(SIZES) if e.rule.megatron == megatron]
    return found


def test_query_key_and_value_are_interleaved_by_group():
    # Group 0: q0 q1 k0 v0; group 1: q2 q3 k1 v1 (megatron/core/transformer/attention.py,
    # get_query_key_value_tensors). Rows are named by tens for q, k and v.
    fused = torch.tensor([10, 11, 20, 30, 12, 13, 21, 31.0])[:, None].expand(8, 3)
    query, key, value = rule("self_attention.linear_qkv.weight").split(fused)
    assert query[:, 0].tolist() == [10, 11, 12, 13]
    assert key[:, 0].tolist() == [20, 21]
    assert value[:, 0].tolist() == [30, 31]
    assert rule("self_attention.linear_qkv.weight").join((query, key, value)).equal(fused)


def test_gate_stands_above_up():
    fused = torch.arange(12.0).view(4, 3)
    gate, up = rule("mlp.linear_fc1.weight").split(fused)
    assert gate.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert up.tolist() == [[6, 7, 8], [9, 10, 11]]
    assert rule("mlp.linear_fc1.weight").join((gate, up)).equal(fused)


def test_names_and_shapes_are_those_of_transformers():
    config = Qwen3Config(
        vocab_size=70,
        hidden_size=24,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        tie_word_embeddings=False,
    )
    theirs = {n: tuple(t.shape) for n, t in Qwen3ForCausalLM(config).state_dict().items()}
    sizes = Sizes(layers=3, hidden=24, ffn=50, heads=6, groups=2, head_dim=10, vocab=70)
    ours = {n: s for e in entries(sizes) for n, s in zip(e.hf_names, e.hf_shapes, strict=True)}
    assert ours == theirs


def test_a_tied_model_has_no_output_layer():
    tied = Sizes(layers=1, hidden=3, ffn=2, heads=4, groups=2, head_dim=1, vocab=5, tied=True)
    names = [name for entry in entries(tied) for name in entry.hf_names]
    assert "lm_head.weight" not in names
    assert len(names) == 2 + sum(len(rule.hf) for rule in LAYER_RULES)


def test_padding_of_the_vocabulary():
    # Padded sizes of 151,669 entries with divisor 128 at 1, 2, 4 and 8 ranks.
    sizes = Sizes(
        layers=1, hidden=1, ffn=1, heads=1, groups=1, head_dim=1, vocab=151_669, vocab_divisor=128
    )
    for rows in (151_669, 151_680, 151_808, 152_064, 152_576):
        assert sizes.may_be_padded_to(rows)
    for rows in (151_668, 151_936, 151_681, 50_304):
        assert not sizes.may_be_padded_to(rows)
