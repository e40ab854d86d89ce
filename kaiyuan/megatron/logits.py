"""The logits of Megatron's own model, for comparison with an exported one.

This is the other side of the proof that weights were converted right: the checkpoint is read by
Megatron's loader into Megatron's GPTModel, and none of kaiyuan's conversion takes part.
"""

import logging
import multiprocessing
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kaiyuan.checkpoint.describe import CheckpointInfo
from kaiyuan.checkpoint.hf_config import canonical_model
from kaiyuan.checkpoint.load import TorchDistCheckpoint
from kaiyuan.checkpoint.names import EMBEDDING

Logits = npt.NDArray[np.float32]


def compare_logits(info: CheckpointInfo, hf_folder: Path, tokens: Sequence[Sequence[int]]) -> float:
    """Return the largest absolute difference of the logits of both models, in fp32.

    Args:
        info: the checkpoint. Megatron unpickles parts of it: use this on what you made yourself.
        hf_folder: the exported model.
        tokens: ids, [batch, sequence].
    """
    ours = megatron_logits(info, tokens)
    theirs = transformers_logits(hf_folder, tokens)
    return float(np.abs(ours - theirs).max())


def transformers_logits(hf_folder: Path, tokens: Sequence[Sequence[int]]) -> Logits:
    """Return the logits of transformers' model, [batch, sequence, vocabulary]."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor(tokens)).logits.numpy()


def megatron_logits(info: CheckpointInfo, tokens: Sequence[Sequence[int]]) -> Logits:
    """Return the logits of Megatron's model, [batch, sequence, vocabulary without padding].

    Runs in a new process, because Megatron keeps its state in globals and what stands in for CUDA
    on a CPU changes torch.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_megatron_logits, info, tokens).result()


def _megatron_logits(info: CheckpointInfo, tokens: Sequence[Sequence[int]]) -> Logits:
    # Torch and Megatron warn of names of each other that are about to go, and of each of a dozen
    # optional packages that are not needed here.
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    from kaiyuan.megatron import cpu

    cpu.install()
    model = load_model(info)
    ids = torch.tensor(tokens, device=torch.cuda.current_device())
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    with torch.inference_mode():
        logits = model(ids, positions, None)
    return logits[..., : info.vocab_size].float().cpu().numpy()


def load_model(info: CheckpointInfo) -> Any:
    """Return Megatron's GPTModel in fp32 with the weights of a checkpoint, in one process.

    Whatever split the checkpoint was trained with, it is loaded without one. Without CUDA,
    :func:`kaiyuan.megatron.cpu.install` must have been called.
    """
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from kaiyuan.megatron import layers

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    arguments = canonical_model(info.model)
    config = _transformer_config(arguments)
    rows = TorchDistCheckpoint(info.folder).tensors[EMBEDDING.megatron].shape[0]
    model = GPTModel(
        config,
        layers.block_spec(SimpleNamespace(transformer=config)),
        vocab_size=rows,
        max_sequence_length=arguments["max_position_embeddings"],
        share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
        position_embedding_type="rope",
        rotary_base=arguments["rotary_base"],
    )
    state = {"model": model.sharded_state_dict()}
    model.load_state_dict(dist_checkpointing.load(state, str(info.folder))["model"])
    return model.eval().to(torch.cuda.current_device())


def _transformer_config(arguments: dict[str, Any]) -> Any:
    from megatron.core.transformer import TransformerConfig

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
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
    )
