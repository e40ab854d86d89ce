"""Cross-entropy over a large vocabulary in three passes over the logits, as Triton kernels.

The forward reads the logits once; the backward reads them again and leaves their gradient in their
place. Imported only where there is CUDA.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from kaiyuan.megatron import loss

_BLOCK = 8192


@triton.jit
def _soft_cap(x, CAP: tl.constexpr):
    # kaiyuan.megatron.loss.soft_cap; tanh(x) is 2 * sigmoid(2 * x) - 1
    if CAP > 0:
        x = CAP * (2 * tl.sigmoid(x * (2 / CAP)) - 1)
    return x


@triton.jit
def _forward(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    target_ptr,
    size,
    first,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = logits_ptr + row.to(tl.int64) * size
    highest = -float("inf")
    total = 0.0
    for block in range(0, size, BLOCK):
        cols = block + tl.arange(0, BLOCK)
        x = _soft_cap(tl.load(start + cols, mask=cols < size, other=0.0).to(tl.float32), CAP)
        x = tl.where(cols < size, x, -float("inf"))
        before = highest
        highest = tl.maximum(highest, tl.max(x))
        total = total * tl.exp(before - highest) + tl.sum(tl.exp(x - highest))
    tl.store(lse_ptr + row, highest + tl.log(total))
    label = tl.load(labels_ptr + row) - first
    here = (label >= 0) & (label < size)
    target = tl.load(start + label, mask=here, other=0.0).to(tl.float32)
    tl.store(target_ptr + row, _soft_cap(target, CAP))


@triton.jit
def _backward(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    grad_ptr,
    size,
    first,
    CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start = logits_ptr + row.to(tl.int64) * size
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < size
    label = tl.load(labels_ptr + row) - first
    x = _soft_cap(tl.load(start + cols, mask=mask, other=0.0).to(tl.float32), CAP)
    grad = tl.exp(x - tl.load(lse_ptr + row)) - tl.where(cols == label, 1.0, 0.0)
    if CAP > 0:
        grad *= 1 - (x / CAP) * (x / CAP)
    tl.store(start + cols, grad * tl.load(grad_ptr + row).to(tl.float32), mask=mask)


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: torch.distributed.ProcessGroup | None,
        cap: float | None,
    ) -> Tensor:
        size = logits.shape[-1]
        first = 0 if group is None else group.rank() * size
        lse = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        target = torch.empty_like(lse)
        _forward[(labels.numel(),)](
            logits, labels, lse, target, size, first, CAP=cap or 0.0, BLOCK=_BLOCK, num_warps=8
        )
        if group is not None:
            lse = loss.merge(lse, target, group)
        ctx.save_for_backward(labels, lse)
        ctx.logits = logits  # not saved with the others: the backward overwrites it
        ctx.first, ctx.cap = first, cap or 0.0
        return lse - target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        labels, lse = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None
        if logits is None:
            raise RuntimeError("the logits are gone: this loss can be differentiated once only")
        size = logits.shape[-1]
        _backward[(labels.numel(), triton.cdiv(size, _BLOCK))](
            logits,
            labels,
            lse,
            grad.contiguous(),
            size,
            ctx.first,
            CAP=ctx.cap,
            BLOCK=_BLOCK,
            num_warps=8,
        )
        return logits, None, None, None


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: torch.distributed.ProcessGroup | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the cross-entropy of each token in nats, fp32, [...].

    Args:
        logits: [..., vocabulary, or this rank's part of it]; overwritten by the backward.
        labels: [...], ids of the whole vocabulary.
        group: the ranks that share the vocabulary, where there are several.
        cap: of the logits; see :func:`kaiyuan.megatron.loss.soft_cap`.
    """
    return _CrossEntropy.apply(logits.contiguous(), labels.contiguous(), group, cap)
