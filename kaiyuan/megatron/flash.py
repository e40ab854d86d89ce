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


class _FlashAttention(Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        from flash_attn.cute.interface import _flash_attn_fwd

        out = torch.empty_like(query)
        lse = _flash_attn_fwd(
            *(x.transpose(0, 1) for x in (query, key, value)),
            softmax_scale=scale,
            causal=True,
            out=out.transpose(0, 1),
            return_lse=True,
        )[1]
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from flash_attn.cute.interface import _flash_attn_bwd

        query, key, value, out, lse = ctx.saved_tensors
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)]
        dq, dk, dv = (x.transpose(0, 1) for x in grads)
        _flash_attn_bwd(
            *(x.transpose(0, 1) for x in (query, key, value, out, grad)),
            lse,
            softmax_scale=ctx.scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            dq=dq,
            dk=dk,
            dv=dv,
        )
        return *grads, None


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attend; query i sees the keys up to i.

    Args:
        query: [sequence, batch, heads, head size], bf16 or fp16.
        key: [sequence, batch, groups, head size].
        value: like ``key``; may be a view.
        scale: of the scores; None for 1 / sqrt(head size).

    Returns:
        [sequence, batch, heads, head size].
    """
    return _FlashAttention.apply(query, key, value, scale)
