"""Run in a process of its own: one check of the layers or of the loss on a CPU, by its name.

python -m tests.layer_checks packed_documents
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

import kaiyuan.megatron  # noqa: F401
from kaiyuan.megatron import loss
from kaiyuan.megatron.layers import SDPA, block_spec


def attention() -> SDPA:
    core = SDPA.__new__(SDPA)
    torch.nn.Module.__init__(core)
    core.dropout, core.softmax_scale = 0.0, None
    return core


def packed_documents() -> None:
    """No token sees another document, and the gradients neither."""
    from megatron.core.packed_seq_params import PackedSeqParams

    core, lengths = attention(), [3, 1, 7]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = [torch.randn(11, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    documents = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=11, max_seqlen_kv=11)
    out = core(*packed, None, packed_seq_params=documents)
    alone = [
        core(*(x[first : first + n].unsqueeze(1) for x in packed), None).squeeze(1)
        for first, n in zip(bounds.tolist(), lengths, strict=False)
    ]
    torch.testing.assert_close(out, torch.cat(alone))
    (grad,) = torch.autograd.grad(out[4:].sum(), packed[2])
    assert not grad[:4].any()
    assert grad[4:].any()


def key_cache() -> None:
    """The last queries alone, with all keys, give what they give among all queries."""
    core = attention()
    query, key, value = (torch.randn(9, 2, heads, 8) for heads in (4, 2, 2))
    full = core(query, key, value, None)
    for last in (1, 4):
        torch.testing.assert_close(core(query[-last:], key, value, None), full[-last:])


def losses_are_megatrons() -> None:
    """Values and gradients are Megatron's within 1e-6, with capped logits too."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    start_group(0, 1)
    parallel_state.initialize_model_parallel()
    logits = (torch.randn(7, 3, 501) * 3).requires_grad_()
    labels = torch.randint(0, 501, (7, 3))
    group = parallel_state.get_tensor_model_parallel_group()
    for cap in (None, 2.5):
        # Megatron's overwrites what it is given.
        given = logits * 1 if cap is None else torch.tanh(logits / cap) * cap
        theirs = vocab_parallel_cross_entropy(given, labels)
        (their_grad,) = torch.autograd.grad(theirs.sum(), logits)
        for ranks in (None, group):
            ours = loss.cross_entropy(logits * 1, labels, ranks, cap)
            (our_grad,) = torch.autograd.grad(ours.sum(), logits)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(our_grad, their_grad, rtol=1e-6, atol=1e-6)


def loss_kernels() -> None:
    """Triton's interpreter runs the kernels of the loss on a CPU: values and gradients."""
    from kaiyuan.megatron import loss_kernels

    labels = torch.randint(0, 9001, (5, 2))
    for cap, dtype in ((None, torch.float32), (2.0, torch.float32), (2.0, torch.float16)):
        logits = (torch.randn(5, 2, 9001) * 3).to(dtype).requires_grad_()
        exact = logits.detach().double().requires_grad_()
        capped = exact if cap is None else cap * torch.tanh(exact / cap)
        theirs = torch.nn.functional.cross_entropy(capped.transpose(1, 2), labels, reduction="none")
        ours = loss_kernels.cross_entropy(logits * 1, labels, cap=cap)
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
        (grad,) = torch.autograd.grad(ours.sum(), logits)
        (their_grad,) = torch.autograd.grad(theirs.sum(), exact)
        error = (grad.double() - their_grad).norm() / their_grad.norm()
        assert error < (1e-6 if dtype == torch.float32 else 1e-3), error


def layer_kernels() -> None:
    """The same of the kernels of the layers, with a second sequence packed behind the first."""
    from kaiyuan.megatron import kernels

    kernels._num_sms = lambda _: 2  # so that a program takes several rows
    eps, groups, heads, size = 1e-6, 2, 3, 8
    norm = torch.nn.functional.rms_norm

    def agree(ours: Any, plain: Any, *inputs: torch.Tensor) -> None:
        leaves = [x.requires_grad_() for x in inputs]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        outs, expected = ours(*leaves), plain(*exact)
        seeds = [torch.randn_like(out) for out in outs]
        grads = torch.autograd.grad(outs, leaves, seeds)
        theirs = torch.autograd.grad(expected, exact, [seed.double() for seed in seeds])
        for value, right in zip([*outs, *grads], [*expected, *theirs], strict=True):
            torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=1e-5)

    def swiglu(x: torch.Tensor) -> tuple[torch.Tensor]:
        gate, up = x.chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up,)

    x, weight = torch.randn(7, 3, 24), torch.randn(24)
    agree(
        lambda x, w: (kernels.rms_norm(x, w, eps),),
        lambda x, w: (norm(x, (24,), w, eps),),
        x,
        weight,
    )
    agree(
        lambda x, w: kernels.rms_norm_with_residual(x, w, eps),
        lambda x, w: (norm(x, (24,), w, eps), x * 1),
        torch.randn(7, 3, 24),
        weight,
    )
    agree(lambda x: (kernels.swiglu(x),), swiglu, torch.randn(5, 2, 26))

    angles = torch.rand(40, 1, 1, size // 2).repeat(1, 1, 1, 2)
    for lengths, batch in (([40], 2), ([3, 36, 1], 1)):
        bounds = None
        if batch == 1:
            bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        turned = torch.cat([angles[:n] for n in lengths]).double()

        def rotated(x: torch.Tensor, turned: torch.Tensor = turned) -> torch.Tensor:
            first, second = x.chunk(2, -1)
            return x * turned.cos() + torch.cat([-second, first], -1) * turned.sin()

        def plain(
            mixed: torch.Tensor, query_weight: torch.Tensor, key_weight: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            parts = mixed.unflatten(-1, (groups, heads + 2, size))
            query = norm(parts[..., :-2, :].flatten(2, 3), (size,), query_weight, eps)
            key = norm(parts[..., -2, :], (size,), key_weight, eps)
            return rotated(query), rotated(key), parts[..., -1, :] * 1

        agree(
            lambda *x, bounds=bounds: kernels.queries_keys_values(*x, angles, groups, eps, bounds),
            plain,
            torch.randn(40, batch, groups * (heads + 2) * size),
            torch.randn(size),
            torch.randn(size),
        )


def merge_over_ranks() -> None:
    """Two ranks with half of the vocabulary each find the loss over all of it."""
    rank = int(os.environ["RANK"])
    start_group(rank, 2)
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 40) * 30, torch.randint(0, 40, (5,))
    part = logits[:, rank * 20 : rank * 20 + 20]
    here = labels // 20 == rank
    target = torch.where(here, logits.gather(1, labels[:, None])[:, 0], 0)
    lse = loss.merge(part.logsumexp(-1), target, torch.distributed.group.WORLD)
    exact = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(lse - target, exact)


def split_sequence() -> None:
    """Two ranks with half of a sequence each give what one gives with all of it."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    rank = int(os.environ["RANK"])
    start_group(rank, 2)
    ranks = torch.distributed.group.WORLD
    torch.manual_seed(0)
    whole = [torch.randn(16, 2, heads, 8, dtype=torch.double) for heads in (4, 2, 2)]
    weight = torch.randn(16, 2, 32, dtype=torch.double)

    def part(x: torch.Tensor) -> torch.Tensor:
        named = {"x": x.detach().transpose(0, 1)}
        split = get_batch_on_this_cp_rank(named, is_hybrid_cp=False, cp_group=ranks)
        return split["x"].transpose(0, 1)

    core = attention()
    for x in whole:
        x.requires_grad_()
    out = core(*whole, None)
    grads = torch.autograd.grad((out * weight).sum(), whole)
    core.ranks = ranks
    mine = [part(x).requires_grad_() for x in whole]
    my_out = core(*mine, None)
    my_grads = torch.autograd.grad((my_out * part(weight)).sum(), mine)
    for ours, theirs in zip((my_out, *my_grads), (out, *grads), strict=True):
        torch.testing.assert_close(ours, part(theirs))


def overlapped_products() -> None:
    """Three ranks with parts of the sequence give what Megatron's linear layers give."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.model_parallel_config import ModelParallelConfig

    from kaiyuan.megatron import overlap

    rank = int(os.environ["RANK"])
    start_group(rank, 3)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=3)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    config = ModelParallelConfig(
        tensor_model_parallel_size=3, sequence_parallel=True, use_cpu_initialization=True
    )
    options = {"config": config, "init_method": torch.nn.init.normal_, "bias": False}
    column = tensor_parallel.ColumnParallelLinear(24, 42, **options)
    options |= {"input_is_parallel": True, "skip_bias_add": True}
    row = tensor_parallel.RowParallelLinear(42, 24, **options)
    x = torch.randn(5, 2, 24, requires_grad=True)
    weight = torch.randn(5, 2, 24)

    def results() -> tuple[torch.Tensor, ...]:
        out, _ = row(torch.tanh(column(x)[0]))
        return out, *torch.autograd.grad((out * weight).sum(), [x, column.weight, row.weight])

    theirs = results()
    overlap.install()
    assert "_Summed" in row(torch.tanh(column(x)[0]))[0].grad_fn.name()
    for ours, expected in zip(results(), theirs, strict=True):
        torch.testing.assert_close(ours, expected)


def nodes_disagree() -> None:
    """Data that is not the same everywhere, and a folder that is not shared, are refused."""
    from pathlib import Path

    from kaiyuan.errors import UserError
    from kaiyuan.megatron import nodes

    rank = int(os.environ["RANK"])
    start_group(rank, 2)
    here = Path(os.environ["STORE"]).parent
    nodes.check_same("hash", "the data")
    nodes.check_shared(here / "checkpoints")
    for check in (
        lambda: nodes.check_same(f"hash {rank}", "the data"),
        lambda: nodes.check_shared(here / f"disk of node {rank}"),
    ):
        try:
            check()
        except UserError as error:
            print(error)
        else:
            raise AssertionError("nothing was found")
    assert not [*(here / "checkpoints").iterdir()]


def checkpoint_names() -> None:
    """A checkpoint names the norms as TransformerEngine's layers do, which fuse them."""
    model = small_model()
    names = {x.key for x in model.sharded_state_dict().values() if hasattr(x, "data")}
    parts = ["linear_qkv.layer_norm_weight", "linear_qkv.weight", "linear_proj.weight"]
    parts += ["q_layernorm.weight", "k_layernorm.weight"]
    layer = {f"decoder.layers.self_attention.{part}" for part in parts}
    layer |= {
        f"decoder.layers.mlp.{part}"
        for part in ("linear_fc1.layer_norm_weight", "linear_fc2.weight")
    }
    assert layer < names, names
    assert "decoder.final_layernorm.weight" in names
    # With TransformerEngine 2.12, Megatron's checkpoints have an extra state of each of these.
    parts = ["linear_qkv", "linear_proj", "q_layernorm", "k_layernorm"]
    modules = {f"layers.self_attention.{part}" for part in parts}
    modules |= {"layers.mlp.linear_fc1", "layers.mlp.linear_fc2", "final_layernorm"}
    extra = {name for name in names if "extra_state" in name}
    assert extra == {f"decoder.{module}._extra_state" for module in modules}, extra


def small_model(**options: bool) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from kaiyuan.megatron.logits import _transformer_config

    start_group(0, 1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    sizes = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "kv_channels": 8}
    heads = {"num_attention_heads": 4, "num_query_groups": 2, "norm_epsilon": 3e-5}
    config = _transformer_config(sizes | heads, torch.float32)
    spec = block_spec(SimpleNamespace(transformer=config), **options)
    return GPTModel(config, spec, 128, 16, position_embedding_type="rope")


def sandwich_norm() -> None:
    """Both branches are normalised before they are added; every norm has the given epsilon."""
    model = small_model(sandwich_norm=True)
    norms = {n: m for n, m in model.named_modules() if n.endswith("norm") and [*m.parameters()]}
    assert len(norms) == 2 * 6 + 1, norms
    assert {norm.eps for norm in norms.values()} == {3e-5}
    names = {x.key for x in model.sharded_state_dict().values() if hasattr(x, "data")}
    for part in ("self_attention", "mlp"):
        assert f"decoder.layers.{part}.post_layernorm.weight" in names, names

    def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 3e-5).sqrt() * weight

    layer = model.decoder.layers[1]
    for norm in norms.values():
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    branches = []
    for module in (layer.self_attention.linear_proj, layer.mlp.linear_fc2):
        module.register_forward_hook(lambda _module, _inputs, out: branches.append(out[0]))
    x = torch.randn(16, 3, 32)
    out, _ = layer(x, None, rotary_pos_emb=model.rotary_pos_emb(16))
    expected = x + rms(branches[0], layer.self_attention.post_layernorm.weight)
    expected = expected + rms(branches[1], layer.mlp.post_layernorm.weight)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def fallbacks_are_megatrons() -> None:
    """Norm, scaling and step are those that they replace; the step goes on after loading."""
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    from kaiyuan.megatron import fallbacks

    tensors = [torch.randn(n, 3) for n in (5, 1, 8)]
    ours, _ = fallbacks._l2_norm(0, tensors[0], [tensors], False)
    theirs, _ = local_multi_tensor_l2_norm(0, tensors[0], [tensors], False)
    torch.testing.assert_close(ours, theirs)
    for in_place in (True, False):
        pairs = [[x.clone() for x in tensors] for _ in range(2)]
        outs = pairs if in_place else [[torch.empty_like(x) for x in tensors] for _ in range(2)]
        fallbacks._scale(0, tensors[0], [pairs[0], outs[0]], 0.3)
        local_multi_tensor_scale(0, tensors[0], [pairs[1], outs[1]], 0.3)
        torch.testing.assert_close(outs[0], outs[1])

    grads = [torch.randn(2, 3) for _ in range(6)]
    ends = []
    for fused in (False, True):
        weight = torch.nn.Parameter(torch.ones(2, 3))
        optimizer = torch.optim.AdamW([weight])
        wrapped = fallbacks._with_fused_step(lambda o=optimizer: SimpleNamespace(optimizer=o))
        if fused:
            wrapped()
        for number, grad in enumerate(grads):
            if number == 3:  # as a checkpoint without the fused step
                state = optimizer.state_dict()
                state["param_groups"][0]["fused"] = None
                optimizer.load_state_dict(state)
            assert bool(optimizer.param_groups[0]["fused"]) == fused
            weight.grad = grad.clone()
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(ends[0], ends[1])


def start_group(rank: int, size: int) -> None:
    store = torch.distributed.HashStore()
    if size > 1:
        store = torch.distributed.FileStore(os.environ["STORE"], size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
