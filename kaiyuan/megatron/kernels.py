"""Triton kernels for what lies between the matrix products of a layer, with their gradients.

All of them are bound by memory: each reads its inputs once, computes in fp32 and writes its output
once. They take any floating type and, where not said otherwise, contiguous tensors. Imported only
where there is CUDA; Triton comes with PyTorch's CUDA builds.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

# Programs on each multiprocessor that share the rows in the backward of RMSNorm; each leaves one
# partial sum of the weight's gradient.
_PROGRAMS_PER_SM = 4
_TOKENS = 32  # tokens a program takes at a time in the kernels on heads
_COLUMNS = 2048  # of SwiGLU, a program


@cache
def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _weight_gradient(weight: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient in fp32 as the weight's; or add it where Megatron accumulates in fp32.

    Megatron's linear layers do the same: what they return then is never read.
    """
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None or not hasattr(weight, "grad_added_to_main_grad"):
        return grad.to(weight.dtype)
    main_grad.add_(grad)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


# ---- RMSNorm ----


@triton.jit
def _rms_norm_forward(x_ptr, weight_ptr, out_ptr, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    x = tl.load(x_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / size + eps)
    tl.store(out_ptr + row + cols, x * scale * weight, mask=mask)


@triton.jit
def _rms_norm_backward(
    grad_ptr,
    x_ptr,
    weight_ptr,
    residual_grad_ptr,
    x_grad_ptr,
    weight_grad_ptr,
    rows,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    mask = cols < size
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([BLOCK], tl.float32)
    row = tl.program_id(0).to(tl.int64) * size
    step = tl.num_programs(0).to(tl.int64) * size
    end = rows.to(tl.int64) * size
    x_next = tl.load(x_ptr + row + cols, mask=mask, other=0.0)
    grad_next = tl.load(grad_ptr + row + cols, mask=mask, other=0.0)
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = x_next.to(tl.float32)
        grad = grad_next.to(tl.float32)
        # The next row is on its way while this one is summed.
        following = mask & (row + step < end)
        x_next = tl.load(x_ptr + row + step + cols, mask=following, other=0.0)
        grad_next = tl.load(grad_ptr + row + step + cols, mask=following, other=0.0)
        scale = tl.rsqrt(tl.sum(x * x) / size + eps)
        normed = x * scale
        weight_grad += grad * normed
        grad *= weight
        x_grad = scale * (grad - normed * (tl.sum(grad * normed) / size))
        if HAS_RESIDUAL:
            x_grad += tl.load(residual_grad_ptr + row + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_grad_ptr + row + cols, x_grad, mask=mask)
        row += step
    tl.store(weight_grad_ptr + tl.program_id(0) * size + cols, weight_grad, mask=mask)


def _norm_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    size = x.shape[-1]
    out = torch.empty_like(x)
    _rms_norm_forward[(x.numel() // size,)](
        x, weight, out, size, eps, BLOCK=triton.next_power_of_2(size), num_warps=4
    )
    return out


def _norm_backward(
    grad: Tensor, residual_grad: Tensor | None, x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    rows = x.numel() // size
    programs = min(rows, _PROGRAMS_PER_SM * _num_sms(x.device))
    x_grad = torch.empty_like(x)
    weight_grad = torch.empty(programs, size, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(programs,)](
        grad.contiguous(),
        x,
        weight,
        x if residual_grad is None else residual_grad.contiguous(),
        x_grad,
        weight_grad,
        rows,
        size,
        eps,
        HAS_RESIDUAL=residual_grad is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=4,
    )
    return x_grad, _weight_gradient(weight, weight_grad.sum(0))


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _norm_forward(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return *_norm_backward(grad, None, x, weight, ctx.eps), None


class _RMSNormWithResidual(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _norm_forward(x, weight, eps), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, residual_grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return *_norm_backward(grad, residual_grad, x, weight, ctx.eps), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, of the type of ``x``."""
    return _RMSNorm.apply(x.contiguous(), weight, eps)


def rms_norm_with_residual(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of ``x``, and ``x`` itself for the residual connection.

    The two gradients of ``x`` then meet in one kernel, not in an addition after it.
    """
    return _RMSNormWithResidual.apply(x.contiguous(), weight, eps)


# ---- SwiGLU ----


@triton.jit
def _swiglu_forward(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < size
    gate = tl.load(x_ptr + row * 2 * size + cols, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + cols, mask=mask).to(tl.float32)
    tl.store(out_ptr + row * size + cols, gate * tl.sigmoid(gate) * up, mask=mask)


@triton.jit
def _swiglu_backward(grad_ptr, x_ptr, x_grad_ptr, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < size
    grad = tl.load(grad_ptr + row * size + cols, mask=mask).to(tl.float32)
    gate = tl.load(x_ptr + row * 2 * size + cols, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + cols, mask=mask).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    gate_grad = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(x_grad_ptr + row * 2 * size + cols, gate_grad, mask=mask)
    tl.store(x_grad_ptr + row * 2 * size + size + cols, grad * gate * sigmoid, mask=mask)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        size = x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], size)
        grid = (out.numel() // size, triton.cdiv(size, _COLUMNS))
        _swiglu_forward[grid](x, out, size, BLOCK=_COLUMNS, num_warps=8)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        size = x.shape[-1] // 2
        x_grad = torch.empty_like(x)
        grid = (grad.numel() // size, triton.cdiv(size, _COLUMNS))
        _swiglu_backward[grid](grad.contiguous(), x, x_grad, size, BLOCK=_COLUMNS, num_warps=8)
        return x_grad


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., size], of gate and up side by side, [..., 2 * size]."""
    return _SwiGLU.apply(x.contiguous())


# ---- Query, key and value: split, norm and rotary positions ----
#
# A row of the projection holds, group after group, the query heads, the key head and the value
# head of the group. One program takes one group of _TOKENS tokens, so that its heads share the
# cosines and sines, each head as its two halves, which the rotation mixes.


@triton.jit
def _halves(ptr, offsets, mask, half):
    first = tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(ptr + offsets + half, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(ptr, offsets, first, second, mask, half):
    tl.store(ptr + offsets, first, mask=mask)
    tl.store(ptr + offsets + half, second, mask=mask)


@triton.jit
def _scale(first, second, half, eps):
    return tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * half) + eps)


@triton.jit
def _queries_keys_forward(
    mixed_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    query_ptr,
    key_ptr,
    tokens,
    batch,
    groups,
    half,
    eps,
    PER_GROUP: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
):
    group = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    col = tl.arange(0, HALF)[None, :]
    in_head = col < half
    mask = (token < tokens) & in_head
    cos = tl.load(cos_ptr + (token // batch) * half + col, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + (token // batch) * half + col, mask=mask, other=0.0)
    # the group's first head in the projection and in the queries, and its key
    row = token.to(tl.int64) * groups + group
    mixed = row * (PER_GROUP + 2) * 2 * half + col
    query = row * PER_GROUP * 2 * half + col
    key = row * 2 * half + col
    for slot in tl.static_range(PER_GROUP + 1):
        x1, x2 = _halves(mixed_ptr, mixed + slot * 2 * half, mask, half)
        if NORM:
            scale = _scale(x1, x2, half, eps)[:, None]
            if slot < PER_GROUP:
                w1, w2 = _halves(query_weight_ptr, col, in_head, half)
            else:
                w1, w2 = _halves(key_weight_ptr, col, in_head, half)
            x1 *= scale * w1
            x2 *= scale * w2
        out1 = x1 * cos - x2 * sin
        out2 = x2 * cos + x1 * sin
        if slot < PER_GROUP:
            _store_halves(query_ptr, query + slot * 2 * half, out1, out2, mask, half)
        else:
            _store_halves(key_ptr, key, out1, out2, mask, half)


@triton.jit
def _queries_keys_backward(
    query_grad_ptr,
    key_grad_ptr,
    value_grad_ptr,
    mixed_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    mixed_grad_ptr,
    weight_grad_ptr,
    tokens,
    batch,
    groups,
    half,
    eps,
    PER_GROUP: tl.constexpr,
    NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
):
    group = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    col = tl.arange(0, HALF)[None, :]
    in_head = col < half
    mask = (token < tokens) & in_head
    cos = tl.load(cos_ptr + (token // batch) * half + col, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + (token // batch) * half + col, mask=mask, other=0.0)
    row = token.to(tl.int64) * groups + group
    mixed = row * (PER_GROUP + 2) * 2 * half + col
    query = row * PER_GROUP * 2 * half + col
    key = row * 2 * half + col
    for slot in tl.static_range(PER_GROUP + 1):
        if slot < PER_GROUP:
            out1, out2 = _halves(query_grad_ptr, query + slot * 2 * half, mask, half)
        else:
            out1, out2 = _halves(key_grad_ptr, key, mask, half)
        grad1 = out1 * cos + out2 * sin
        grad2 = out2 * cos - out1 * sin
        if NORM:
            x1, x2 = _halves(mixed_ptr, mixed + slot * 2 * half, mask, half)
            scale = _scale(x1, x2, half, eps)[:, None]
            x1 *= scale
            x2 *= scale
            if slot < PER_GROUP:
                w1, w2 = _halves(query_weight_ptr, col, in_head, half)
            else:
                w1, w2 = _halves(key_weight_ptr, col, in_head, half)
            # one partial sum a program and head: [blocks, groups, PER_GROUP + 1, 2 * half]
            program = tl.program_id(0) * groups + group
            partial = weight_grad_ptr + (program * (PER_GROUP + 1) + slot) * 2 * half
            cols = tl.arange(0, HALF)
            sum1 = tl.sum(grad1 * x1, 0)
            sum2 = tl.sum(grad2 * x2, 0)
            _store_halves(partial, cols, sum1, sum2, cols < half, half)
            grad1 *= w1
            grad2 *= w2
            mean = ((tl.sum(grad1 * x1, 1) + tl.sum(grad2 * x2, 1)) / (2 * half))[:, None]
            grad1 = scale * (grad1 - x1 * mean)
            grad2 = scale * (grad2 - x2 * mean)
        _store_halves(mixed_grad_ptr, mixed + slot * 2 * half, grad1, grad2, mask, half)
    value1, value2 = _halves(value_grad_ptr, key, mask, half)
    last = mixed + (PER_GROUP + 1) * 2 * half
    _store_halves(mixed_grad_ptr, last, value1, value2, mask, half)


class _QueriesKeysValues(Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        groups: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sequence, batch, width = mixed.shape
        half = cos.shape[-1]
        per_group = width // (2 * half * groups) - 2
        query = mixed.new_empty(sequence, batch, groups * per_group, 2 * half)
        key = mixed.new_empty(sequence, batch, groups, 2 * half)
        value = mixed.view(sequence, batch, groups, per_group + 2, 2 * half)[..., -1, :]
        ctx.save_for_backward(mixed, query_weight, key_weight, cos, sin)
        ctx.shape = (sequence * batch, batch, groups, half, eps)
        ctx.options = {
            "PER_GROUP": per_group,
            "NORM": query_weight is not None,
            "TOKENS": _TOKENS,
            "HALF": triton.next_power_of_2(half),
        }
        _queries_keys_forward[(triton.cdiv(sequence * batch, _TOKENS), groups)](
            mixed, query_weight, key_weight, cos, sin, query, key, *ctx.shape, **ctx.options
        )
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, query_grad: Tensor, key_grad: Tensor, value_grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        mixed, query_weight, key_weight, cos, sin = ctx.saved_tensors
        tokens, _, groups, half, _ = ctx.shape
        per_group, norm = ctx.options["PER_GROUP"], ctx.options["NORM"]
        blocks = triton.cdiv(tokens, _TOKENS)
        mixed_grad = torch.empty_like(mixed)
        partial = None
        if norm:
            partial = torch.empty(
                blocks, groups, per_group + 1, 2 * half, dtype=torch.float32, device=mixed.device
            )
        _queries_keys_backward[(blocks, groups)](
            query_grad.contiguous(),
            key_grad.contiguous(),
            value_grad.contiguous(),
            mixed,
            query_weight,
            key_weight,
            cos,
            sin,
            mixed_grad,
            partial,
            *ctx.shape,
            **ctx.options,
        )
        weight_grads: tuple[Tensor | None, Tensor | None] = (None, None)
        if partial is not None:
            sums = partial.sum((0, 1))
            weight_grads = (
                _weight_gradient(query_weight, sums[:per_group].sum(0)),
                _weight_gradient(key_weight, sums[per_group]),
            )
        return mixed_grad, *weight_grads, None, None, None, None


# Megatron hands every layer the same tensor of angles, and of bounds where documents are packed.
_tables = WeakTensorKeyDictionary()


def _cos_sin(angles: Tensor, bounds: Tensor | None, tokens: int) -> tuple[Tensor, Tensor]:
    key = angles if bounds is None else bounds
    if key not in _tables:
        first = angles[..., : angles.shape[-1] // 2].flatten(0, -2).float()
        if bounds is not None:
            first = first[_positions(bounds, tokens)]
        _tables[key] = (first.cos(), first.sin())
    return _tables[key]


def _positions(bounds: Tensor, tokens: int) -> Tensor:
    places = torch.arange(tokens, dtype=bounds.dtype, device=bounds.device)
    return places - bounds[torch.searchsorted(bounds, places, right=True) - 1]


def queries_keys_values(
    mixed: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    angles: Tensor,
    groups: int,
    eps: float,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the projection of a layer and prepare queries and keys for attention.

    Args:
        mixed: [sequence, batch, groups * (query heads a group + 2) * head size].
        query_weight: of the RMSNorm over each query head, [head size]; None for no norm.
        key_weight: of the RMSNorm over each key head; None where ``query_weight`` is.
        angles: [positions, 1, 1, head size], radians; the second half repeats the first.
        groups: key (and value) heads.
        eps: of the norm.
        bounds: [documents + 1], where documents are packed: their first tokens, and the number of
            all tokens. Positions then count from the beginning of each; the batch is 1.

    Returns:
        Query [sequence, batch, heads, head size], key and value [sequence, batch, groups, head
        size]; the value is a view of ``mixed``.
    """
    cos, sin = _cos_sin(angles, bounds, mixed.shape[0])
    return _QueriesKeysValues.apply(
        mixed.contiguous(), query_weight, key_weight, cos, sin, groups, eps
    )
