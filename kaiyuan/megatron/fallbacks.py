"""What Megatron does slowly or not at all where neither Apex nor TransformerEngine is installed.

Each of its fallbacks is replaced by what PyTorch itself has fused. Where Apex or TransformerEngine
is there, theirs stay.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import megatron.core.optimizer as optimizers
import megatron.training.training as training
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import layers
from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale
from torch import Tensor


def install() -> None:
    """Put all of them in place; must run before ``pretrain``, and only with CUDA."""
    # Older versions of torch cannot; Megatron then says how to go without.
    can_add_in_fp32 = "dtype_out" in torch.ops.aten.addmm.overloads()
    if can_add_in_fp32 and not layers._grad_accum_fusion_available:
        # As Apex's extension, but in this one module: others must not take it for installed.
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=_add_weight_gradient,
            wgrad_gemm_accum_fp16=_add_weight_gradient,
        )
        layers._grad_accum_fusion_available = True
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
    if clip_grads.multi_tensor_scale_impl is local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = _scale
    if optimizers.USING_PYTORCH_OPTIMIZER:
        training.get_megatron_optimizer = _with_fused_step(training.get_megatron_optimizer)


def _add_weight_gradient(x: Tensor, grad: Tensor, main_grad: Tensor) -> None:
    """Add grad^T x to ``main_grad`` within the matrix product.

    Args:
        x: input of the layer, [tokens, in], bf16 or fp16.
        grad: gradient of its output, [tokens, out], of the same type.
        main_grad: [out, in], fp32 or the type of the others.
    """
    x = x.reshape(-1, x.shape[-1])
    grad = grad.reshape(-1, grad.shape[-1])
    if main_grad.dtype == x.dtype:
        torch.addmm(main_grad, grad.t(), x, out=main_grad)
    else:
        torch.addmm(main_grad, grad.t(), x, out_dtype=main_grad.dtype, out=main_grad)


def _l2_norm(
    _chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], _per_tensor: bool
) -> tuple[Tensor, None]:
    """Return the norm of all tensors together, [1], without waiting for the device."""
    norms = torch._foreach_norm(tensors[0])
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def _scale(_chunk: int, _overflow: Tensor, tensors: list[list[Tensor]], factor: float) -> None:
    """Write factor times the first list of tensors to the second."""
    sources, targets = tensors
    if any(a.data_ptr() != b.data_ptr() for a, b in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)
    torch._foreach_mul_(targets, factor)


def _with_fused_step(get_optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch's AdamW do its step in one kernel; Megatron asks for no kind of step."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        optimizer = get_optimizer(*args, **kwargs)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner = getattr(part, "optimizer", None)
            if isinstance(inner, torch.optim.Adam):  # AdamW is one, too
                _fuse(inner)
                # A checkpoint brings the options with which it was written.
                inner.register_load_state_dict_post_hook(_fuse)
        return optimizer

    return wrapped


def _fuse(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    for parameter, state in optimizer.state.items():
        if "step" in state:
            # the kernel counts on the device
            state["step"] = torch.as_tensor(
                state["step"], dtype=torch.float32, device=parameter.device
            ).clone()
