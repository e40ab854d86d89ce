"""The proof that weights were converted right: the logits of both models, on the same tokens.

The checkpoint goes through Megatron's own loader into Megatron's GPTModel; none of the conversion
takes part in it.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kaiyuan.checkpoint.describe import CheckpointInfo
from kaiyuan.checkpoint.hf_config import register_variant

Tokens = Sequence[Sequence[int]]
Logits = npt.NDArray[np.float32]


def compare_logits(info: CheckpointInfo, hf_folder: Path, tokens: Tokens) -> float:
    """Return the largest absolute difference of the logits of both models, in fp32.

    Args:
        info: the checkpoint.
        hf_folder: the exported model.
        tokens: ids, [batch, sequence].
    """
    difference = megatron_logits(info, tokens) - transformers_logits(hf_folder, tokens)
    return float(np.abs(difference).max())


def transformers_logits(hf_folder: Path, tokens: Tokens) -> Logits:
    """Return the logits of transformers' model in fp32, [batch, sequence, vocabulary]."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    register_variant()
    model = AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor(tokens)).logits.numpy()


def megatron_logits(info: CheckpointInfo, tokens: Tokens) -> Logits:
    """Return the logits of Megatron's model in fp32, [batch, sequence, vocabulary].

    Megatron's loader unpickles parts of a checkpoint without checks: use this on checkpoints of
    your own. It runs in a new process, because Megatron keeps its state in globals and because
    what stands in for CUDA on a CPU changes torch.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_megatron_logits, info, tokens).result()


def _megatron_logits(info: CheckpointInfo, tokens: Tokens) -> Logits:
    from kaiyuan.megatron.logits import logits

    return logits(info, tokens)
