"""The logits of Megatron's own model; see kaiyuan/checkpoint/parity.py."""

import logging
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from kaiyuan.checkpoint.describe import CheckpointInfo
from kaiyuan.checkpoint.hf_config import canonical_model
from kaiyuan.checkpoint.load import TorchDistCheckpoint, listed
from kaiyuan.checkpoint.names import EMBEDDING
from kaiyuan.errors import UserError
from kaiyuan.megatron import layers, loss


def logits(
    info: CheckpointInfo, tokens: Sequence[Sequence[int]], rounded_to: str = "float32"
) -> npt.NDArray[np.float32]:
    """Return the logits in fp32, [batch, sequence, vocabulary without padding].

    Args:
        info: the checkpoint.
        tokens: ids, [batch, sequence].
        rounded_to: type that the weights are rounded to; the computing is in fp32 all the same.
    """
    quiet()
    model = load_model(info)
    for weight in model.parameters():
        weight.data = weight.data.to(getattr(torch, rounded_to)).float()
    ids = torch.tensor(tokens, device=torch.cuda.current_device())
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    with torch.inference_mode():
        out = model(ids, positions, None)
    return out[..., : info.vocab_size].float().cpu().numpy()


def quiet() -> None:
    """Silence torch and Megatron, which warn of names of each other that are about to go."""
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)


def stored_dtype(info: CheckpointInfo) -> torch.dtype:
    """Return the type of a checkpoint's weights."""
    return TorchDistCheckpoint(info.folder).tensors[EMBEDDING.megatron].dtype


def load_model(info: CheckpointInfo, dtype: torch.dtype = torch.float32) -> Any:
    """Return Megatron's GPTModel with the weights of a checkpoint, in one process.

    Whatever split and type the checkpoint was trained with, it is loaded without the one and in
    ``dtype``.
    """
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    arguments = canonical_model(info.model)
    config = _transformer_config(arguments, dtype)
    rows = TorchDistCheckpoint(info.folder).tensors[EMBEDDING.megatron].shape[0]
    model = GPTModel(
        config,
        layers.block_spec(
            SimpleNamespace(transformer=config), sandwich_norm=arguments.get("sandwich_norm", False)
        ),
        vocab_size=rows,
        max_sequence_length=arguments["max_position_embeddings"],
        share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
        position_embedding_type="rope",
        rotary_base=arguments["rotary_base"],
    )
    if cap := arguments.get("output_logit_cap"):
        # In training the loss does it.
        model.output_layer.register_forward_hook(
            lambda _layer, _inputs, out: (loss.soft_cap(out[0], cap), *out[1:])
        )
    # Scaling factors of FP8, which no weight here has; not every checkpoint has the same of them.
    wanted = {k: v for k, v in model.sharded_state_dict().items() if "_extra_state" not in k}
    state = dist_checkpointing.load({"model": wanted}, str(info.folder))["model"]
    missing = [k for k in model.load_state_dict(state, strict=False)[0] if "_extra_state" not in k]
    if missing:
        raise UserError(f"{info.folder} lacks tensors of the model: {listed(missing)}")
    return model.eval().to(torch.cuda.current_device())


def _transformer_config(arguments: dict[str, Any], dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=arguments["num_layers"],
        hidden_size=arguments["hidden_size"],
        ffn_hidden_size=arguments["ffn_hidden_size"],
        num_attention_heads=arguments["num_attention_heads"],
        num_query_groups=arguments["num_query_groups"],
        kv_channels=arguments["kv_channels"],
        layernorm_epsilon=arguments["norm_epsilon"],
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        use_cpu_initialization=True,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
