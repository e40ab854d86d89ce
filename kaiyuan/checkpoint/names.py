"""The one table of tensor names: Megatron's GPTModel on one side, Qwen3ForCausalLM on the other.

KaiyuanForCausalLM (modeling_kaiyuan.py) has two names more in each layer.

Each :class:`Rule` ties one tensor of Megatron to one, two or three of Hugging Face's. Export reads
the table from left to right, import from right to left, so that the two cannot drift apart.

Sources: megatron-core 0.19.2 (models/gpt, transformer/attention.py, transformer/mlp.py) and
transformers' models/qwen3.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# No model of this family has more query heads than this, among which the ranks divide.
MOST_TENSOR_RANKS = 64


@dataclass(frozen=True)
class Sizes:
    """The sizes that fix the shape of every tensor.

    Attributes:
        layers: transformer layers.
        hidden: width of the residual stream.
        ffn: width of the MLP (of the gate, and of the up projection).
        heads: query heads.
        groups: key and value heads; ``heads`` is a multiple of it.
        head_dim: width of a head; heads * head_dim need not be ``hidden``.
        vocab: rows of the embedding, without padding.
        tied: the output layer is the embedding.
        vocab_divisor: Megatron pads the vocabulary to a multiple of this and of the number of
            tensor-parallel ranks.
        sandwich: there are norms after attention and after the MLP, too.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    tied: bool = False
    vocab_divisor: int = 128
    sandwich: bool = False

    def may_be_padded_to(self, rows: int) -> bool:
        """Tell whether some number of tensor-parallel ranks makes Megatron pad to ``rows``."""
        steps = (self.vocab_divisor * ranks for ranks in range(1, MOST_TENSOR_RANKS + 1))
        return rows == self.vocab or any(-(-self.vocab // s) * s == rows for s in steps)


class AsIs:
    """One tensor on both sides, in the same layout."""

    def split(self, tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return Hugging Face's tensors."""
        return (tensor,)

    def join(self, parts: tuple[Tensor, ...], sizes: Sizes) -> Tensor:
        """Return Megatron's tensor."""
        return parts[0]


class GateUp(AsIs):
    """Gate above up, along the rows."""

    def split(self, tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return gate and up, [ffn, hidden] each, of [2 * ffn, hidden]."""
        return tensor.split(sizes.ffn)

    def join(self, parts: tuple[Tensor, ...], sizes: Sizes) -> Tensor:
        """Return [2 * ffn, hidden]."""
        return torch.cat(parts)


class QueryKeyValue(AsIs):
    """Query, key and value, interleaved by group.

    Megatron's rows are, group after group, the query heads of the group, its key head and its
    value head, so that a split along the rows gives each rank whole groups. Hugging Face keeps all
    query heads in one tensor, in the same order, and likewise the key and the value heads.
    """

    def _blocks(self, sizes: Sizes) -> tuple[int, int, int]:
        """Return the rows of query, key and value in one group."""
        return sizes.heads // sizes.groups * sizes.head_dim, sizes.head_dim, sizes.head_dim

    def split(self, tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
        """Return query [heads * head_dim, hidden], key and value [groups * head_dim, hidden]."""
        groups = tensor.view(sizes.groups, -1, tensor.shape[-1])
        return tuple(
            part.reshape(-1, tensor.shape[-1]) for part in groups.split(self._blocks(sizes), dim=1)
        )

    def join(self, parts: tuple[Tensor, ...], sizes: Sizes) -> Tensor:
        """Return [(heads + 2 * groups) * head_dim, hidden]."""
        width = parts[0].shape[-1]
        return torch.cat([p.view(sizes.groups, -1, width) for p in parts], 1).view(-1, width)


@dataclass(frozen=True)
class Rule:
    """One row of the table.

    Attributes:
        megatron: the name as it stands in a checkpoint, without the prefix of the layer.
        hf: Hugging Face's names, without the prefix of the layer.
        layout: how one becomes the others.
        alias: a second name that Megatron may use. Its layers are built either with fused norms
            (TransformerEngine) or with norms of their own; checkpoints carry the name of the
            fused form unless the builder of the layers left out the map between them.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: AsIs
    alias: str | None = None


LAYER_RULES = (
    Rule(
        "self_attention.linear_qkv.layer_norm_weight",
        ("input_layernorm.weight",),
        AsIs(),
        alias="input_layernorm.weight",
    ),
    Rule(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        QueryKeyValue(),
    ),
    Rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), AsIs()),
    Rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), AsIs()),
    Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), AsIs()),
    Rule(
        "mlp.linear_fc1.layer_norm_weight",
        ("post_attention_layernorm.weight",),
        AsIs(),
        alias="pre_mlp_layernorm.weight",
    ),
    Rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GateUp()),
    Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), AsIs()),
)
# Sandwich norm has these besides; Hugging Face's names are those of its GLM-4.
SANDWICH_RULES = (
    Rule("self_attention.post_layernorm.weight", ("post_self_attn_layernorm.weight",), AsIs()),
    Rule("mlp.post_layernorm.weight", ("post_mlp_layernorm.weight",), AsIs()),
)
EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), AsIs())
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), AsIs())
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), AsIs())

# Rows of these are vocabulary entries: Megatron pads them, Hugging Face does not.
VOCABULARY_RULES = (EMBEDDING, OUTPUT)

MEGATRON_LAYERS = "decoder.layers."


@dataclass(frozen=True)
class Entry:
    """A rule at one place of the model.

    Attributes:
        rule: the row of the table.
        layer: the layer, or None outside of the layers.
        sizes: of the model.
    """

    rule: Rule
    layer: int | None
    sizes: Sizes

    @property
    def hf_names(self) -> tuple[str, ...]:
        """Hugging Face's full names."""
        if self.layer is None:
            return self.rule.hf
        return tuple(f"model.layers.{self.layer}.{name}" for name in self.rule.hf)

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of Hugging Face's tensors."""
        return tuple(hf_shape(name, self.sizes) for name in self.rule.hf)

    @property
    def megatron_shape(self) -> tuple[int, ...]:
        """The shape of Megatron's tensor, of one layer, without padding of the vocabulary."""
        shapes = self.hf_shapes
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Turn Megatron's tensor into Hugging Face's, in the order of ``hf_names``."""
        return self.rule.layout.split(tensor, self.sizes)

    def join(self, parts: tuple[Tensor, ...]) -> Tensor:
        """Turn Hugging Face's tensors into Megatron's."""
        return self.rule.layout.join(parts, self.sizes)


def entries(sizes: Sizes) -> Iterator[Entry]:
    """Yield every tensor of a model, in the order of the forward pass."""
    yield Entry(EMBEDDING, None, sizes)
    for layer in range(sizes.layers):
        for rule in LAYER_RULES + (SANDWICH_RULES if sizes.sandwich else ()):
            yield Entry(rule, layer, sizes)
    yield Entry(FINAL_NORM, None, sizes)
    if not sizes.tied:
        yield Entry(OUTPUT, None, sizes)


def hf_shape(name: str, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape that transformers gives to a tensor.

    Args:
        name: as in the table, without the prefix of the layer.
        sizes: of the model.
    """
    queries, keys = sizes.heads * sizes.head_dim, sizes.groups * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (sizes.vocab, sizes.hidden),
        "lm_head": (sizes.vocab, sizes.hidden),
        "norm": (sizes.hidden,),
        "input_layernorm": (sizes.hidden,),
        "post_attention_layernorm": (sizes.hidden,),
        "post_self_attn_layernorm": (sizes.hidden,),
        "post_mlp_layernorm": (sizes.hidden,),
        "q_norm": (sizes.head_dim,),
        "k_norm": (sizes.head_dim,),
        "q_proj": (queries, sizes.hidden),
        "k_proj": (keys, sizes.hidden),
        "v_proj": (keys, sizes.hidden),
        "o_proj": (sizes.hidden, queries),
        "gate_proj": (sizes.ffn, sizes.hidden),
        "up_proj": (sizes.ffn, sizes.hidden),
        "down_proj": (sizes.hidden, sizes.ffn),
    }
    return shapes[name.split(".")[-2]]
