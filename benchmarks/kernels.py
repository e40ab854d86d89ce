"""Measure the operations between the matrix products of a layer, and the products themselves.

    python benchmarks/kernels.py [--tokens 16384]

Needs a CUDA device. Each operation with its gradient at qwen3_1p7b's shapes: as PyTorch has it,
as torch.compile makes it, as Liger has it (where installed), and as kaiyuan/megatron/kernels.py
does it. Medians, in microseconds.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from kaiyuan.megatron import kernels, loss_kernels

try:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    LIGER = True
except ImportError:
    LIGER = False

HIDDEN, FFN, HEADS, GROUPS, HEAD, VOCAB = 2048, 6144, 16, 8, 128, 151936
SEQUENCE = 4096
Case = tuple[str, str, Callable[..., Any], list[Tensor]]


def main() -> None:
    """Print a table of all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16384)
    tokens = parser.parse_args().tokens
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {tokens} tokens")
    print("| operation | by | forward us | backward us |")
    print("|---|---|---|---|")
    for make in (norm_cases, swiglu_cases, queries_cases, loss_cases, attention_cases):
        for case in make(tokens):
            print(measure(*case), flush=True)
        torch.cuda.empty_cache()
    products(tokens)


def measure(name: str, by: str, function: Callable[..., Any], inputs: list[Tensor]) -> str:
    """Return one line of the table."""
    try:
        leaves = [x.detach().requires_grad_() for x in inputs]
        with torch.no_grad():
            forward_ms = do_bench(lambda: function(*inputs), return_mode="median")
        outs = function(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        grads = [torch.randn_like(x) for x in outs]

        def backward() -> None:
            torch.autograd.grad(outs, leaves, grads, retain_graph=True)

        backward_ms = do_bench(backward, return_mode="median")
    except Exception as error:  # a variant that does not run is a result
        return f"| {name} | {by} | {type(error).__name__}: {str(error)[:80]} |"
    return f"| {name} | {by} | {forward_ms * 1e3:.0f} | {backward_ms * 1e3:.0f} |"


def random(*shape: int) -> Tensor:
    """Return normal noise in bf16."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def norm_cases(tokens: int) -> Iterator[Case]:
    """RMSNorm over the hidden size."""
    inputs = [random(tokens, HIDDEN), random(HIDDEN)]

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, w.shape, w, 1e-6)

    def with_residual(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return plain(x, w), x

    yield "RMSNorm", "torch", plain, inputs
    yield "RMSNorm", "compiled", torch.compile(plain), inputs
    if LIGER:
        yield "RMSNorm", "Liger", lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6), inputs
    yield "RMSNorm", "ours", lambda x, w: kernels.rms_norm(x, w, 1e-6), inputs
    yield "RMSNorm + residual", "torch", with_residual, inputs
    yield "RMSNorm + residual", "compiled", torch.compile(with_residual), inputs
    ours = lambda x, w: kernels.rms_norm_with_residual(x, w, 1e-6)  # noqa: E731
    yield "RMSNorm + residual", "ours", ours, inputs


def swiglu_cases(tokens: int) -> Iterator[Case]:
    """SwiGLU of gate and up side by side."""
    inputs = [random(tokens, 2 * FFN)]

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    yield "SwiGLU", "torch", plain, inputs
    yield "SwiGLU", "compiled", torch.compile(plain), inputs
    if LIGER:
        yield "SwiGLU", "Liger", lambda x: LigerSiLUMulFunction.apply(*x.chunk(2, -1)), inputs
    yield "SwiGLU", "ours", kernels.swiglu, inputs


def queries_cases(tokens: int) -> Iterator[Case]:
    """The projection to queries, keys and values: split, QK-norm, RoPE."""
    batch = tokens // SEQUENCE
    per_group = HEADS // GROUPS
    inputs = [random(SEQUENCE, batch, GROUPS * (per_group + 2) * HEAD), random(HEAD), random(HEAD)]
    frequencies = 10000.0 ** (-torch.arange(0, HEAD, 2, device="cuda") / HEAD)
    angles = torch.outer(torch.arange(SEQUENCE, device="cuda"), frequencies)
    angles = torch.cat([angles, angles], -1)[:, None, None]
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def plain(mixed: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        parts = mixed.view(SEQUENCE, batch, GROUPS, -1).split([per_group * HEAD, HEAD, HEAD], -1)
        query = parts[0].reshape(SEQUENCE, batch, HEADS, HEAD)
        query = F.rms_norm(query, (HEAD,), q_weight, 1e-6)
        key = F.rms_norm(parts[1], (HEAD,), k_weight, 1e-6)
        return rotated(query), rotated(key), parts[2]

    yield "split + QK-norm + RoPE", "torch", plain, inputs
    yield "split + QK-norm + RoPE", "compiled", torch.compile(plain), inputs
    ours = lambda m, q, k: kernels.queries_keys_values(m, q, k, angles, GROUPS, 1e-6)  # noqa: E731
    yield "split + QK-norm + RoPE", "ours", ours, inputs


def loss_cases(tokens: int) -> Iterator[Case]:
    """Cross-entropy; the kernels that overwrite the logits are timed on what they leave."""
    inputs = [random(tokens, VOCAB)]
    labels = torch.randint(0, VOCAB, (tokens,), device="cuda")

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(x, labels, reduction="none")

    yield "cross-entropy", "torch", plain, inputs
    yield "cross-entropy", "compiled", torch.compile(plain), inputs
    if LIGER:

        def liger(x: Tensor) -> Tensor:
            return LigerCrossEntropyFunction.apply(x, labels, None, -100, 0.0, 0.0, "none")[0]

        yield "cross-entropy", "Liger", liger, inputs

    class Kept(torch.autograd.Function):
        """Ours, with the logits kept for the next round."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.x = x
            return loss_kernels.cross_entropy(x, labels)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                x = ctx.x.detach().requires_grad_()
                loss_kernels.cross_entropy(x, labels).backward(grad)
            return ctx.x

    yield "cross-entropy", "ours (backward: both)", Kept.apply, inputs


def attention_cases(tokens: int) -> Iterator[Case]:
    """Causal attention of grouped queries, in Megatron's layout and in PyTorch's."""
    batch = tokens // SEQUENCE
    shapes = [(SEQUENCE, batch, n, HEAD) for n in (HEADS, GROUPS, GROUPS)]
    megatron = [random(*shape) for shape in shapes]
    usual = [random(shape[1], shape[2], shape[0], shape[3]) for shape in shapes]
    mixed = random(SEQUENCE, batch, GROUPS, HEADS // GROUPS + 2, HEAD)[..., -1, :]
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):

        def attend(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def permuted(q: Tensor, k: Tensor, v: Tensor, attend: Any = attend) -> Tensor:
            out = attend(*(x.permute(1, 2, 0, 3) for x in (q, k, v)))
            return out.permute(2, 0, 1, 3).reshape(SEQUENCE, batch, -1)

        by = backend.name.split("_")[0]
        yield "attention, [b h s d]", by, attend, usual
        yield "attention, [s b h d]", by, permuted, megatron
        yield "attention, strided value", by, permuted, [*megatron[:2], mixed]

    def default(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    yield "attention, [s b h d]", "default", default, megatron


def products(tokens: int) -> None:
    """Print the rates of the matrix products in TFLOP/s, by cuBLAS and by cuBLASLt."""
    print("| product | out x in | library | forward | input gradient | weight gradient |")
    print("|---|---|---|---|---|---|")
    shapes = {
        "QKV": ((HEADS + 2 * GROUPS) * HEAD, HIDDEN),
        "projection": (HIDDEN, HEADS * HEAD),
        "gate, up": (2 * FFN, HIDDEN),
        "down": (HIDDEN, FFN),
        "output": (VOCAB, HIDDEN),
    }
    for name, (rows, cols) in shapes.items():
        x, weight = random(tokens, cols), random(rows, cols)
        grad, main = random(tokens, rows), torch.zeros(rows, cols, device="cuda")
        for library in ("cublas", "cublaslt"):
            torch.backends.cuda.preferred_blas_library(library)
            rates = [
                2 * tokens * rows * cols / do_bench(run, return_mode="median") / 1e9
                for run in (
                    lambda x=x, w=weight: x @ w.t(),
                    lambda g=grad, w=weight: g @ w,
                    lambda x=x, g=grad, m=main: torch.addmm(
                        m, g.t(), x, out_dtype=torch.float32, out=m
                    ),
                )
            ]
            cells = " | ".join(f"{rate:.0f}" for rate in rates)
            print(f"| {name} | {rows} x {cols} | {library} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
