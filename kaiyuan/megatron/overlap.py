"""Tensor parallelism whose transfers hide behind the products that wait for them.

With sequence parallelism, Megatron's linear layers gather the whole input before a product and sum
the outputs after it; only in the backward of ColumnParallelLinear does something run meanwhile.
But the rows of a rank's own part of the sequence need nothing from the others: they are multiplied
while the rest is on its way, and the rows of the others are multiplied first where they have to be
sent. TransformerEngine's ``tp_comm_overlap`` is for its own layers only.
"""

from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

_linear = layers.linear_with_grad_accumulation_and_async_allreduce
_row_forward = layers.RowParallelLinear.forward


# The order in which Megatron's autograd function takes them.
_ARGUMENTS = (
    *("input", "weight", "bias", "gradient_accumulation_fusion", "allreduce_dgrad"),
    *("sequence_parallel", "grad_output_buffer", "wgrad_deferral_limit", "tp_group"),
)


def install() -> None:
    """Put it in place; must run before ``pretrain``."""
    # Megatron asks its function, by its name, whether it has warned of the number of queues.
    _linear_of_parts.warned = _linear.warned  # type: ignore[attr-defined]
    layers.linear_with_grad_accumulation_and_async_allreduce = _linear_of_parts
    layers.RowParallelLinear.forward = _sum_of_parts


def _linear_of_parts(*args: Any, sequence_parallel: bool, tp_group: Any, **more: Any) -> Tensor:
    more |= {"sequence_parallel": sequence_parallel, "tp_group": tp_group}
    if not sequence_parallel or tp_group is None or more.get("gtp_remat_size", 1) > 1:
        return _linear(*args, **more)
    values = dict(zip(("input", "weight"), args, strict=False)) | more
    return _Gathered.apply(*(values.get(name) for name in _ARGUMENTS), 1)


def _sum_of_parts(self: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    if not self.sequence_parallel or self.explicit_expert_comm or self.gtp_remat_size > 1:
        return _row_forward(self, x)
    out = _Summed.apply(x, self.weight, self.gradient_accumulation_fusion, self.tp_group)
    if self.skip_bias_add or self.bias is None:
        return out, self.bias
    return out + self.bias, None


def _gather(x: Tensor, group: Any) -> tuple[Tensor, Any]:
    """Return where the parts of all ranks will be, and what to wait for."""
    shape = [x.shape[0] * group.size(), *x.shape[1:]]
    whole = get_global_memory_buffer().get_tensor(shape, x.dtype, "mpu")
    handle = torch.distributed.all_gather_into_tensor(whole, x, group=group, async_op=True)
    return whole, handle


def _multiply_gathered(x: Tensor, weight: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Return the product of the parts of all ranks with ``weight``, and these parts.

    Args:
        x: this rank's part, [sequence / ranks, batch, in].
        weight: [in, out].
        group: the ranks.
    """
    x = x.contiguous()
    whole, handle = _gather(x, group)
    out = x.new_empty(*whole.shape[:-1], weight.shape[1])
    own, others = _parts(group, whole.shape[0])
    _multiply(x, weight, out[own])
    handle.wait()
    for part in others:
        _multiply(whole[part], weight, out[part])
    return out, whole


def _multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.mm(x.flatten(0, 1), weight, out=out.view(-1, out.shape[-1]))


def _parts(group: Any, length: int) -> tuple[slice, list[slice]]:
    """Return where a rank's own rows are, and those of the ranks before and after it."""
    rows, rank = length // group.size(), group.rank()
    others = [slice(0, rank * rows), slice((rank + 1) * rows, length)]
    own = slice(rank * rows, (rank + 1) * rows)
    return own, [part for part in others if part.stop > part.start]


class _Gathered(layers.LinearWithGradAccumulationAndAsyncCommunication):
    """ColumnParallelLinear: the gathered sequence times the weight; the backward is Megatron's."""

    @staticmethod
    @layers.custom_fwd
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        fusion: bool,
        allreduce: bool,
        sequence_parallel: bool,
        buffer: Any,
        limit: Any,
        group: Any,
        remat: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = getattr(weight, "main_grad", None) if fusion else None
        ctx.use_bias, ctx.gradient_accumulation_fusion = bias is not None, fusion
        ctx.allreduce_dgrad, ctx.sequence_parallel = allreduce, sequence_parallel
        ctx.grad_output_buffer, ctx.wgrad_deferral_limit = buffer, limit
        ctx.tp_group, ctx.gtp_remat_size = group, remat
        out, _ = _multiply_gathered(x, weight.t(), group)
        return out if bias is None else out + bias


class _Summed(Function):
    """RowParallelLinear: this rank's part of the sequence, summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, fusion: bool, group: Any) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.main_grad = getattr(weight, "main_grad", None) if fusion else None
        ctx.fusion, ctx.group = fusion, group
        own, others = _parts(group, x.shape[0])
        rows = own.stop - own.start
        sent = x.new_empty(x.shape[0] - rows, x.shape[1], weight.shape[0])
        place = 0
        for part in others:
            end = place + part.stop - part.start
            _multiply(x[part], weight.t(), sent[place:end])
            place = end
        received = torch.empty_like(sent)
        sizes = [0 if rank == group.rank() else rows for rank in range(group.size())]
        handle: Any = torch.distributed.all_to_all_single(
            received, sent, sizes, sizes, group=group, async_op=True
        )
        out = x.new_empty(rows, *sent.shape[1:])
        _multiply(x[own], weight.t(), out)
        handle.wait()
        for part in received.split(rows):
            out += part
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_grad, whole = _multiply_gathered(grad, weight, ctx.group)
        rows, grads = x.flatten(0, 1), whole.flatten(0, 1)
        if not ctx.fusion:
            return x_grad, grads.t() @ rows, None, None
        add = layers.fused_weight_gradient_mlp_cuda
        fp32 = ctx.main_grad.dtype == torch.float32
        (add.wgrad_gemm_accum_fp32 if fp32 else add.wgrad_gemm_accum_fp16)(
            rows, grads, ctx.main_grad
        )
        if not hasattr(weight, "grad_added_to_main_grad"):
            return x_grad, None, None, None
        # What is returned then is never read.
        weight.grad_added_to_main_grad = True
        return x_grad, torch.empty_like(weight), None, None
