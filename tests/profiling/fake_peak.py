"""Run in a process of its own: the peak of a forward and backward of our layers, without a GPU.

    python -m tests.profiling.fake_peak '[{"micro_batch_size": 2, ...}, ...]'

The tensors are torch's fake ones: they have sizes and lifetimes, but no values. They pass for
tensors of a GPU, so that the layers take their way on CUDA, whose kernels are left out. Prints, for
each set of changes to the params of qwen3_1p7b, the most bytes that were alive beside weights and
gradient buffers.
"""

import json
import sys
import types
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kaiyuan.megatron  # noqa: F401
from kaiyuan.config import load_params
from kaiyuan.megatron import fallbacks, flash, kernels, layers, loss, loss_kernels


class Peak(TorchDispatchMode):
    """Adds up the storages that are alive after each operation."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        held = [x for p in model.parameters() for x in (p, p.main_grad)]
        self.held = {StorageWeakRef(x.untyped_storage()).cdata for x in held}
        self.alive: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                if reference.cdata not in self.held:
                    self.alive.setdefault(reference.cdata, reference)
        total = 0
        for key, reference in list(self.alive.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.alive[key]
            else:
                total += storage.nbytes()
        self.peak = max(self.peak, total)
        return out


def leave_out_kernels() -> None:
    torch.Tensor.is_cuda = property(lambda _: True)
    launch = SimpleNamespace()
    launch = type("Kernel", (), {"__getitem__": lambda self, grid: lambda *a, **k: None})()
    for module in (kernels, loss_kernels):
        for name, value in vars(module).items():
            if type(value).__name__ == "JITFunction":
                setattr(module, name, launch)
    kernels._num_sms = lambda device: 132
    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = lambda q, k, v, out, **_: (
        out,
        q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32),
    )
    interface._flash_attn_bwd = lambda *_, **__: None
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["flash_attn.cute.interface"] = interface
    flash.is_available = lambda device: True
    fallbacks.install()
    from megatron.core.tensor_parallel import layers as linear

    linear.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=lambda *_: None)


def build(a: dict[str, Any]) -> torch.nn.Module:
    """Return Megatron's model as a training has it, in bf16 with gradient buffers in fp32."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    names = [
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
        *("num_query_groups", "kv_channels", "normalization", "qk_layernorm"),
        *("attention_dropout", "hidden_dropout", "recompute_granularity"),
        *("recompute_method", "recompute_num_layers", "recompute_modules"),
    ]
    config = TransformerConfig(
        **{name: a[name] for name in names if name in a},
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=True,
    )
    model = GPTModel(
        config,
        layers.block_spec(
            SimpleNamespace(transformer=config), sandwich_norm=a.get("sandwich_norm", False)
        ),
        vocab_size=a["vocab_size"],
        max_sequence_length=a["seq_length"],
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
        parameter.main_grad = torch.empty(parameter.shape)
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return model


def peak(changes: dict[str, Any]) -> int:
    params = load_params("qwen3_1p7b")
    a = params.arguments(params.phases[0]) | changes
    with FakeTensorMode():
        model = build(a)
        tokens = torch.zeros(a["micro_batch_size"], a["seq_length"], dtype=torch.int64)
        with Peak(model) as memory:
            losses = model(tokens, tokens, None, labels=tokens, output_processor=loss.token_losses)
            losses.sum().backward()
    return memory.peak


def main() -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    leave_out_kernels()
    print("PEAKS", json.dumps([peak(changes) for changes in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
