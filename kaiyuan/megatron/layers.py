"""The layers of our models, for Megatron's ``transformer_impl: local``.

Megatron's own local layers cannot attend efficiently (they build the whole score matrix) and its
RMSNorm refuses sequence parallelism. These take their place: attention through PyTorch's
scaled_dot_product_attention and one RMSNorm for all five places (before attention, before the MLP,
query, key, and the final one, which is not part of the layer but of the block), with sandwich norm
for seven (after attention and after the MLP).

On CUDA what lies between the matrix products runs in the kernels of kaiyuan/megatron/kernels.py;
elsewhere the same values come from plain operations. Both have the same parameters.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer import mlp as megatron_mlp
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from kaiyuan.megatron import flash


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
        if x.is_cuda:
            from kaiyuan.megatron import kernels

            return kernels.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Return the weight for a checkpoint, as one that every tensor-parallel rank has.

        Megatron's MLP does not say so of the modules in it; without it each rank would write one.
        """
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            sharded_offsets=sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


class ResidualRMSNorm(RMSNorm):
    """The norm at the head of a residual branch.

    In training on CUDA it returns its input as well; Megatron's layer takes that one for the
    residual connection, so that both gradients of the input meet in one kernel.
    """

    def forward(self, x: Tensor) -> Any:
        """Return the normalised tensor, or that and ``x``."""
        if x.is_cuda and torch.is_grad_enabled():
            from kaiyuan.megatron import kernels

            return kernels.rms_norm_with_residual(x, self.weight, self.eps)
        return super().forward(x)


class StandaloneRMSNorm(RMSNorm):
    """A norm that TransformerEngine does not fuse into the next product: query, key, final.

    Its module has an ``_extra_state`` in checkpoints, for the scaling factors of FP8, and Megatron
    does not load a checkpoint that lacks it. Ours has one, too, which is None.
    """

    def get_extra_state(self) -> None:
        """Return what a checkpoint gets."""

    def set_extra_state(self, state: object) -> None:
        """Ignore what TransformerEngine wrote."""


class SDPA(MegatronModule):
    """Core attention through torch.nn.functional.scaled_dot_product_attention.

    Causal; grouped queries are not copied out. With context parallelism each rank has two chunks of
    the sequence, gathers the keys and values of all ranks and attends with its own queries. The
    arguments are those with which Megatron's SelfAttention builds its core attention.
    """

    ranks: Any = None  # the group that shares a sequence, where one does

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"only causal attention is built here, not {attn_mask_type}")
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = softmax_scale
        if config.context_parallel_size > 1 and pg_collection is not None:
            self.ranks = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> Tensor:
        """Attend.

        Args:
            query: [queries, batch, heads, head size]; packed: [tokens, heads, head size].
            key: [keys, batch, query groups, head size]; with a cache there are more keys than
                queries, and the last query sees all keys.
            value: like ``key``.
            packed_seq_params: where documents are packed, their boundaries; no token then sees
                another document.

        Returns:
            [queries, batch, heads * head size]; packed: [tokens, heads * head size].
        """
        if self.ranks is not None:
            return self._attend_split(query, key, value)
        if packed_seq_params is None:
            return self._attend(query, key, value)
        return self._attend_documents(query, key, value, packed_seq_params)

    def _attend_documents(
        self, query: Tensor, key: Tensor, value: Tensor, documents: PackedSeqParams
    ) -> Tensor:
        bounds, longest = documents.cu_seqlens_q, documents.max_seqlen_q
        if self._flash_takes(query, key.shape[0]):
            scale = self.softmax_scale
            return flash.causal_attention(query, key, value, scale, bounds, longest).flatten(1)
        packed = _pytorch_packed()
        if packed and self._pytorch_takes(query):
            scale = self.softmax_scale
            out = packed(query, key, value, bounds, bounds, longest, longest, scale=scale)
            return out.flatten(1)
        lengths = bounds.diff().tolist()
        pieces = zip(*(x.unsqueeze(1).split(lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self._attend(*piece) for piece in pieces]).squeeze(1)

    def _pytorch_takes(self, query: Tensor) -> bool:
        return (
            query.is_cuda
            and query.dtype in (torch.bfloat16, torch.float16)
            and torch.cuda.get_device_capability(query.device)[0] >= 8
            and not self._drops()
        )

    def _drops(self) -> bool:
        return bool(self.dropout and self.training)

    def _attend_split(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pairs = whole_sequence(torch.stack([key, value], dim=1), self.ranks)
        chunk = query.shape[0] // 2
        places = self.ranks.rank(), 2 * self.ranks.size() - 1 - self.ranks.rank()
        out = []
        for place, part in zip(places, query.split(chunk), strict=True):
            keys, values = pairs[: (place + 1) * chunk].unbind(1)
            out.append(self._attend(part, keys, values))
        return torch.cat(out)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        num_queries, batch, num_heads, _size = query.shape
        num_keys, num_groups = key.shape[0], key.shape[2]
        if self._flash_takes(query, num_keys):
            return flash.causal_attention(query, key, value, self.softmax_scale).flatten(2)
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

    def _flash_takes(self, query: Tensor, num_keys: int) -> bool:
        return (
            query.is_cuda
            and query.dtype in (torch.bfloat16, torch.float16)
            and (query.shape[0] == num_keys or self.ranks is not None)
            and query.shape[-1] in (64, 96, 128)
            and not self._drops()
            and flash.is_available(query.device)
        )


@cache
def _pytorch_packed() -> Callable[..., Tensor] | None:
    """Return PyTorch's causal attention within packed documents; before 2.11 it has none."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    attention: Any = varlen.varlen_attn
    known = inspect.signature(attention).parameters
    options = {"window_size": (-1, 0), "enable_gqa": True}
    if "window_size" not in known:
        return None
    return partial(attention, **{k: v for k, v in options.items() if k in known})


def whole_sequence(x: Tensor, ranks: torch.distributed.ProcessGroup) -> Tensor:
    """Gather a sequence that is split over ranks; the backward sums the gradients of all ranks.

    Args:
        x: [2 chunks, ...]: of n ranks, rank r has the chunks r and 2n - 1 - r, so that all have
            the same work under a causal mask. That is Megatron's split.
        ranks: that share the sequence.

    Returns:
        [2n chunks, ...], in order.
    """
    chunks = gather_from_sequence_parallel_region(x, group=ranks)
    chunks = chunks.view(ranks.size(), 2, -1, *x.shape[1:])
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)


class SelfAttention(megatron_attention.SelfAttention):
    """Megatron's self-attention, with one kernel between its projection and its core on CUDA.

    The kernel splits the projection, normalises and rotates queries and keys. Inference takes
    Megatron's own way.
    """

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **more: Any) -> Any:
        """Return the output of the layer, [sequence, batch, hidden], and no bias."""
        angles: Any = more.get("rotary_pos_emb")
        if not self._is_plain(hidden_states, angles, more):
            return super().forward(hidden_states, attention_mask, **more)
        from kaiyuan.megatron import kernels

        documents = more.get("packed_seq_params")
        mixed, _ = self.linear_qkv(hidden_states)
        query, key, value = kernels.queries_keys_values(
            mixed,
            self.q_layernorm.weight if self.config.qk_layernorm else None,
            self.k_layernorm.weight if self.config.qk_layernorm else None,
            angles,
            self.num_query_groups_per_partition,
            self.config.layernorm_epsilon,
            documents.cu_seqlens_q if documents else None,
        )
        if documents is None:
            return self.linear_proj(self.core_attention(query, key, value))
        packed = (x.squeeze(1) for x in (query, key, value))
        out = self.core_attention(*packed, packed_seq_params=documents)
        return self.linear_proj(out.unsqueeze(1))

    def _is_plain(self, hidden_states: Tensor, angles: Any, more: dict[str, Any]) -> bool:
        config = self.config
        others = ("inference_context", "inference_params", "attention_bias")
        return (
            hidden_states.is_cuda
            and torch.is_tensor(angles)
            and all(more.get(name) is None for name in others)
            and angles.shape[-1] == self.hidden_size_per_attention_head
            and angles.shape[1:3] == (1, 1)
            and config.num_query_groups >= self.world_size
            and not (config.rotary_interleaved or config.no_rope_freq or config.qk_l2_norm)
            and not (config.attention_output_gate or config.test_mode)
            and not (self.checkpoint_core_attention and self.training)
            and not config.fine_grained_activation_offloading
        )


class MLP(megatron_mlp.MLP):
    """Megatron's MLP with SwiGLU in one kernel on CUDA."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **more: Any
    ) -> Any:
        """Return the output, [sequence, batch, hidden], and no bias."""
        config = self.config
        plain = (
            hidden_states.is_cuda
            and per_token_scale is None
            and config.gated_linear_unit
            and config.activation_func is F.silu
            and not config.add_bias_linear
            and config.activation_func_clamp_value is None
            and config.glu_linear_offset == 0
        )
        if not plain:
            return super().forward(hidden_states, per_token_scale, **more)
        from kaiyuan.megatron import kernels

        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(kernels.swiglu(gate_up))


class _PostNorm(torch.nn.Module):
    """A mixin: normalises what the branch after it in the bases gives, before it is added."""

    def __init__(self, config: TransformerConfig, *args: Any, **more: Any) -> None:
        super().__init__(config, *args, **more)
        self.post_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *args: Any, **more: Any) -> Any:
        """Return the normalised output, [sequence, batch, hidden], and no bias."""
        output, _ = super().forward(*args, **more)
        return self.post_layernorm(output), None


class SandwichSelfAttention(_PostNorm, SelfAttention):
    """Self-attention between two norms: x + N_post(Attention(N_pre(x)))."""


class SandwichMLP(_PostNorm, MLP):
    """MLP between two norms: x + N_post(MLP(N_pre(x)))."""


def residual_add(training: bool, fused: bool) -> Any:
    """Return the function that adds a branch to the residual stream.

    Megatron's own compiles itself, which costs more in guards than one addition can save.
    """
    plain = get_bias_dropout_add(training, fused)

    def add(branch_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Any:
        branch, bias = branch_and_bias
        if bias is None and dropout == 0 and branch.is_cuda and branch.dtype == residual.dtype:
            return residual + branch
        return plain(branch_and_bias, residual, dropout)

    return add


def block_spec(
    model_config: Any, vp_stage: int | None = None, sandwich_norm: bool = False
) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline stage and the final norm.

    Args:
        model_config: Megatron's GPTModelConfig.
        vp_stage: the virtual pipeline stage, where there are several to a rank.
        sandwich_norm: normalise the outputs of attention and MLP, too.
    """
    config: TransformerConfig = model_config.transformer
    spec = get_gpt_layer_local_spec(
        qk_layernorm=config.qk_layernorm, normalization=config.normalization
    )
    parts = spec.submodules
    # Recomputing a norm needs its output alone.
    norm = RMSNorm if config.recompute_granularity == "selective" else ResidualRMSNorm
    parts.input_layernorm = parts.pre_mlp_layernorm = norm
    parts.self_attention.module = SandwichSelfAttention if sandwich_norm else SelfAttention
    parts.self_attention.submodules.core_attention = SDPA
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = StandaloneRMSNorm
        parts.self_attention.submodules.k_layernorm = StandaloneRMSNorm
    mlp = SandwichMLP if sandwich_norm else MLP
    parts.mlp = partial(mlp.as_mlp_submodule, submodules=parts.mlp.keywords["submodules"])
    parts.self_attn_bda = parts.mlp_bda = residual_add
    num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=StandaloneRMSNorm)
