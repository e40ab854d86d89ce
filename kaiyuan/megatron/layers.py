"""The layers of our models, for Megatron's ``transformer_impl: local``.

Megatron's own local layers cannot attend efficiently (they build the whole score matrix) and its
RMSNorm refuses sequence parallelism. These take their place: attention through PyTorch's
scaled_dot_product_attention and one RMSNorm for all five places (before attention, before the MLP,
query, key, and the final one, which is not part of the layer but of the block).
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Args:
        config: gives the parameter type and whether the input is split along the sequence; the
            weight is then marked, so that Megatron sums its gradient over the tensor-parallel
            ranks.
        hidden_size: length of the last dimension (the head size for query and key).
        eps: added to the mean square.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised tensor, of the shape and type of ``x``."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SDPA(MegatronModule):
    """Core attention through torch.nn.functional.scaled_dot_product_attention.

    Causal; grouped queries are not copied out. The arguments are those with which Megatron's
    SelfAttention builds its core attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"only causal attention is built here, not {attn_mask_type}")
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend.

        Args:
            query: [queries, batch, heads, head size].
            key: [keys, batch, query groups, head size]; with a cache there are more keys than
                queries, and the last query sees all keys.
            value: like ``key``.

        Returns:
            [queries, batch, heads * head size].
        """
        num_queries, batch, num_heads, _size = query.shape
        num_keys, num_groups = key.shape[0], key.shape[2]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask = None
        if num_queries not in (1, num_keys):
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
            mask = mask.tril(diagonal=num_keys - num_queries)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=num_queries == num_keys,
            scale=self.softmax_scale,
            enable_gqa=num_heads != num_groups,
        )
        return out.permute(2, 0, 1, 3).reshape(num_queries, batch, -1)


def block_spec(model_config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline stage and the final norm.

    Args:
        model_config: Megatron's GPTModelConfig.
        vp_stage: the virtual pipeline stage, where there are several to a rank.
    """
    config: TransformerConfig = model_config.transformer
    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = SDPA
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=RMSNorm)
