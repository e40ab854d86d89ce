"""Causal attention through FlashAttention-4, where it is installed (``pip install kaiyuan[gpu]``).

Its own autograd function allocates a contiguous [batch, sequence, ...] output, which would have to
be copied to Megatron's order; this one has it written in that order.
"""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@cache
def is_available(device: torch.device) -> bool:
    """Return whether it is installed and was measured to be the fastest on such a device."""
    try:
        import flash_attn.cute.interface  # noqa: F401
    except ImportError:
        return False
    # It says so of an argument of its own, at each kernel that it compiles.
    warnings.filterwarnings("ignore", message="Argument aux_data")
    return torch.cuda.get_device_capability(device)[0] == 9


def _batch_first(x: Tensor, bounds: Tensor | None) -> Tensor:
    return x.transpose(0, 1) if bounds is None else x


def _packed(bounds: Tensor | None, longest: int) -> dict[str, Any]:
    if bounds is None:
        return {}
    lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, **lengths}


class _FlashAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        bounds: Tensor | None,
        longest: int,
    ) -> Tensor:
        from flash_attn.cute.interface import _flash_attn_fwd

        out = torch.empty_like(query)
        lse = _flash_attn_fwd(
            *(_batch_first(x, bounds) for x in (query, key, value)),
            softmax_scale=scale,
            causal=True,
            out=_batch_first(out, bounds),
            return_lse=True,
            **_packed(bounds, longest),
        )[1]
        ctx.save_for_backward(query, key, value, out, lse, bounds)
        ctx.scale, ctx.longest = scale, longest
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from flash_attn.cute.interface import _flash_attn_bwd

        query, key, value, out, lse, bounds = ctx.saved_tensors
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
        dq, dk, dv = (_batch_first(x, bounds) for x in grads)
        _flash_attn_bwd(
            *(_batch_first(x, bounds) for x in (query, key, value, out, grad)),
            lse,
            softmax_scale=ctx.scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dq=dq,
            dk=dk,
            dv=dv,
            **_packed(bounds, ctx.longest),
        )
        return *grads, None, None, None


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    bounds: Tensor | None = None,
    longest: int = 0,
) -> Tensor:
    """Attend; query i sees the keys up to i.

    Args:
        query: [sequence, batch, heads, head size], bf16 or fp16; documents that are packed:
            [tokens, heads, head size].
        key: [sequence, batch, groups, head size]; packed: [tokens, groups, head size].
        value: like ``key``; may be a view.
        scale: of the scores; None for 1 / sqrt(head size).
        bounds: [documents + 1], int32, where documents are packed: their first tokens, and the
            number of all tokens. A query sees the keys of its own document alone.
        longest: no document has more tokens.

    Returns:
        Like ``query``.
    """
    return _FlashAttention.apply(query, key, value, scale, bounds, longest)
