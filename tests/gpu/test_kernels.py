"""Each fused operation against float64, its error held against that of the plain operation.

    pytest -m gpu -s tests/gpu

prints the ratios, forward and for each gradient, in bf16 and in fp16. A ratio of 1 is the error
that the type itself makes.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.version.cuda is None or not torch.cuda.is_available(), reason="CUDA"),
]

LARGEST_RATIO = 1.1
EPS = 1e-6
HALF = {"type": torch.bfloat16}


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"], autouse=True)
def half(request: pytest.FixtureRequest) -> None:
    HALF["type"] = request.param


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=HALF["type"])


def run(
    function: Callable[..., Any], inputs: list[Tensor], seeds: list[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    """Return the outputs and the gradients of the inputs."""
    leaves = [x.detach().to(dtype).clone().requires_grad_() for x in inputs]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    seeds = [seed.to(out.dtype) for seed, out in zip(seeds, outs, strict=True)]
    grads = torch.autograd.grad(outs, leaves, seeds)
    return [*(out.detach() for out in outs), *grads]


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def compare(
    name: str, ours: Callable[..., Any], plain: Callable[..., Any], inputs: list[Tensor]
) -> None:
    with torch.no_grad():
        outs = plain(*inputs)
    seeds = [torch.randn_like(x) for x in (outs if isinstance(outs, tuple) else (outs,))]
    exact = run(plain, inputs, seeds, torch.float64)
    rows = zip(
        run(ours, inputs, seeds, HALF["type"]),
        run(plain, inputs, seeds, HALF["type"]),
        exact,
        strict=True,
    )
    errors = [(error(o, e), error(p, e)) for o, p, e in rows]
    cells = ", ".join(f"{o:.2e} / {p:.2e} = {o / p if p else 1:.2f}" for o, p in errors)
    print(f"\n{name}: {cells}")
    for ours_error, plain_error in errors:
        assert ours_error <= LARGEST_RATIO * plain_error


@pytest.mark.parametrize("size", [2048, 768, 128, 96])
def test_rms_norm(size: int) -> None:
    from kaiyuan.megatron import kernels

    inputs = [normal(1025, 2, size) * 3, normal(size)]
    plain = lambda x, w: F.rms_norm(x, w.shape, w, EPS)  # noqa: E731
    compare(f"RMSNorm {size}", lambda x, w: kernels.rms_norm(x, w, EPS), plain, inputs)
    compare(
        f"RMSNorm {size} with residual",
        lambda x, w: kernels.rms_norm_with_residual(x, w, EPS),
        lambda x, w: (plain(x, w), x * 1),
        inputs,
    )


@pytest.mark.parametrize("size", [6144, 3072, 176])
def test_swiglu(size: int) -> None:
    from kaiyuan.megatron import kernels

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    compare(f"SwiGLU {size}", kernels.swiglu, plain, [normal(513, 3, 2 * size)])


@pytest.mark.parametrize("apart", [False, True], ids=["", "documents"])
@pytest.mark.parametrize(
    ("groups", "per_group", "head", "norm"),
    [(8, 2, 128, True), (4, 2, 96, True), (2, 3, 16, True), (3, 1, 64, False)],
)
def test_queries_keys_values(
    groups: int, per_group: int, head: int, norm: bool, apart: bool
) -> None:
    from kaiyuan.megatron import kernels

    sequence, batch = 515, 1 if apart else 3
    frequencies = 10000.0 ** (-torch.arange(0, head, 2, device="cuda") / head)
    angles = torch.outer(torch.arange(sequence, device="cuda"), frequencies)
    angles = torch.cat([angles, angles], -1)[:, None, None]
    lengths = [5, 64, 1, 130, 315] if apart else [515]
    bounds = bounds_of(lengths) if apart else None
    turned = torch.cat([angles[:n] for n in lengths])

    def rotated(x: Tensor) -> Tensor:
        # as Megatron: cosines and sines in the type of x
        cos, sin = (a.to(x.dtype) for a in (turned.double().cos(), turned.double().sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def plain(mixed: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        parts = mixed.view(sequence, batch, groups, per_group + 2, head)
        query = parts[..., :-2, :].reshape(sequence, batch, -1, head)
        key, value = parts[..., -2, :], parts[..., -1, :]
        if weights:
            query = F.rms_norm(query, (head,), weights[0], EPS)
            key = F.rms_norm(key, (head,), weights[1], EPS)
        return rotated(query), rotated(key), value * 1

    def ours(mixed: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        both = weights or (None, None)
        return kernels.queries_keys_values(mixed, *both, angles, groups, EPS, bounds)

    inputs = [normal(sequence, batch, groups * (per_group + 2) * head)]
    inputs += [normal(head), normal(head)] * norm
    compare(f"split, QK-norm {norm}, RoPE; {groups} groups of {per_group}", ours, plain, inputs)


@pytest.mark.parametrize("cap", [None, 30.0, 2.0])
@pytest.mark.parametrize("size", [151936, 20011])
def test_cross_entropy(size: int, cap: float | None) -> None:
    from kaiyuan.megatron import loss_kernels

    labels = torch.randint(0, size, (64, 2), device="cuda")

    def plain(x: Tensor) -> Tensor:
        if cap is not None:
            x = cap * torch.tanh(x / cap)
        return F.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none").view(64, 2)

    def ours(x: Tensor) -> Tensor:
        return loss_kernels.cross_entropy(x * 1, labels, cap=cap)

    compare(f"cross-entropy {size}, cap {cap}", ours, plain, [normal(64, 2, size) * 3])


@pytest.mark.parametrize("cap", [None, 2.0])
def test_cross_entropy_of_a_part_of_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, cap: float | None
) -> None:
    from kaiyuan.megatron import loss, loss_kernels

    size, rows = 20000, 64
    logits = normal(rows, 2 * size) * 3
    labels = torch.randint(0, 2 * size, (rows,), device="cuda")
    exact = logits.double().requires_grad_()
    capped = exact if cap is None else cap * torch.tanh(exact / cap)
    F.cross_entropy(capped, labels, reduction="none").sum().backward()
    whole = capped.detach().float()
    for rank in range(2):
        first = rank * size
        part = logits[:, first : first + size].clone().requires_grad_()

        def merge(_lse: Tensor, target: Tensor, _group: Any) -> Tensor:
            target.copy_(whole.gather(1, labels[:, None])[:, 0])
            return whole.logsumexp(-1)

        monkeypatch.setattr(loss, "merge", merge)
        losses = loss_kernels.cross_entropy(
            part * 1, labels, SimpleNamespace(rank=lambda r=rank: r), cap
        )
        (grad,) = torch.autograd.grad(losses.sum(), part)
        assert error(grad, exact.grad[:, first : first + size]) < 4e-3


def test_a_loss_is_differentiated_once() -> None:
    from kaiyuan.megatron import loss_kernels

    logits = normal(4, 512).requires_grad_()
    loss = loss_kernels.cross_entropy(logits * 1, torch.zeros(4, dtype=torch.long, device="cuda"))
    loss.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once only"):
        loss.sum().backward()


def test_weight_gradients_are_added_in_fp32() -> None:
    from kaiyuan.megatron import fallbacks

    x, grad = normal(4096, 2, 512), normal(4096, 2, 256)
    main = torch.randn(256, 512, device="cuda")
    exact = main.double() + grad.double().flatten(0, 1).t() @ x.double().flatten(0, 1)
    plain = main + (grad.flatten(0, 1).t() @ x.flatten(0, 1))
    fallbacks._add_weight_gradient(x, grad, main)
    ratio = error(main, exact) / error(plain, exact)
    print(f"\nweight gradient: {error(main, exact):.2e}, {ratio:.4f} of a half product")
    assert ratio < 0.1


@pytest.mark.parametrize("by", ["FlashAttention-4", "PyTorch", "one by one"])
@pytest.mark.parametrize(("heads", "groups", "head"), [(16, 8, 128), (8, 4, 96), (4, 2, 64)])
def test_packed_documents_see_themselves_only(
    heads: int, groups: int, head: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kaiyuan.megatron import flash, layers

    core = attention()
    lengths = [5, 64, 1, 130, 700, 124]
    bounds = bounds_of(lengths)
    if by == "FlashAttention-4" and not flash.is_available(bounds.device):
        pytest.skip("FlashAttention-4 is not installed")
    if by == "PyTorch" and not layers._pytorch_packed():
        pytest.skip("this PyTorch has no attention within packed documents")
    if by != "FlashAttention-4":
        monkeypatch.setattr(flash, "is_available", lambda _: False)
    if by == "one by one":
        monkeypatch.setattr(layers, "_pytorch_packed", lambda: None)
    documents = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=1024, max_seqlen_kv=1024)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        return torch.cat([written_out(*(x[:, None] for x in part)) for part in parts])[:, 0]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return core(q, k, v, None, packed_seq_params=documents)

    inputs = [normal(1024, count, head) for count in (heads, groups, groups)]
    name = f"packed documents by {by}, {heads} heads of {head}, {groups} groups"
    compare(name, ours, plain, inputs)


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0).to(torch.int32)


def attention() -> Any:
    from kaiyuan.megatron.layers import SDPA

    core = SDPA.__new__(SDPA)
    torch.nn.Module.__init__(core)
    core.dropout, core.softmax_scale = 0.0, None
    return core


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last queries of a sequence attend to its keys, with all scores in memory."""
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda")
    mask = mask.triu(1 + k.shape[2] - q.shape[2])
    out = scores.masked_fill(mask, -torch.inf).softmax(-1) @ v
    return out.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("queries", [1024, 512, 256])  # the last of 1024, as with a split sequence
@pytest.mark.parametrize(("heads", "groups", "head"), [(16, 8, 128), (8, 4, 96)])
def test_attention(heads: int, groups: int, head: int, queries: int) -> None:
    from kaiyuan.megatron import flash

    core = attention()
    core.ranks = object()  # a sequence that is split goes to FlashAttention, too
    inputs = [normal(queries, 2, heads, head), *(normal(1024, 2, groups, head) for _ in range(2))]
    by = "FlashAttention-4" if flash.is_available(inputs[0].device) else "PyTorch"
    name = f"attention by {by}, {heads} heads of {head}, {groups} groups, {queries}"
    compare(name, core._attend, written_out, inputs)
