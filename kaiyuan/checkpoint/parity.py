"""The proof that weights were converted right: the logits of both models, on the same tokens.

The checkpoint goes through Megatron's own loader into Megatron's GPTModel; none of the conversion
takes part in it.
"""

import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from kaiyuan.checkpoint.describe import CheckpointInfo
from kaiyuan.checkpoint.hf_config import read_config, register_variant, sizes_of
from kaiyuan.checkpoint.load import ModelTensors, TorchDistCheckpoint
from kaiyuan.errors import UserError
from kaiyuan.sampling import check_prompts

Tokens = Sequence[Sequence[int]]
Logits = npt.NDArray[np.float32]


# What README.md promises; the tests allow a tenth of it. Any other model is far above.
BOUND = 1e-4


@dataclass(frozen=True)
class Comparison:
    """A checkpoint and an exported model, compared.

    Attributes:
        difference: largest absolute difference of the logits in fp32.
        tokens: number of tokens whose logits were compared.
        dtype: of the export; the checkpoint's weights were rounded to it.
    """

    difference: float
    tokens: int
    dtype: str

    @property
    def same(self) -> bool:
        """Whether both are the same model."""
        return self.difference <= BOUND

    def __str__(self) -> str:
        """Say so in one line."""
        rounded = "" if self.dtype == "float32" else f", with weights rounded to {self.dtype}"
        verdict = "the same model" if self.same else "not the same model"
        return (
            f"largest difference of the logits of {self.tokens} tokens: {self.difference:.2e} "
            f"({verdict}: {'at most' if self.same else 'above'} {BOUND:.0e} in fp32{rounded})"
        )


def compare(info: CheckpointInfo, hf_folder: Path, text: str) -> Comparison:
    """Compare the logits of both models on the tokens of a text.

    Raises:
        UserError: the folder is not an exported model, the checkpoint is not whole, or the text is
            empty.
    """
    config = read_config(hf_folder)
    try:
        encoder = Tokenizer.from_str((hf_folder / "tokenizer.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise UserError(f"{hf_folder} is not an exported model: it has no {name}") from None
    except Exception as error:  # tokenizers has no class for its own
        raise UserError(f"{hf_folder} is not an exported model: {error}") from error
    check_prompts([text])
    ModelTensors(TorchDistCheckpoint(info.folder), sizes_of(info))  # refuses what does not fit
    ids = encoder.encode(text).ids
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return Comparison(compare_logits(info, hf_folder, [ids], dtype), len(ids), dtype)


def compare_logits(
    info: CheckpointInfo, hf_folder: Path, tokens: Tokens, dtype: str = "float32"
) -> float:
    """Return the largest absolute difference of the logits of both models, in fp32.

    Args:
        info: the checkpoint.
        hf_folder: the exported model.
        tokens: ids, [batch, sequence].
        dtype: of the exported weights. The checkpoint's are rounded to it, so that what is left is
            the difference of two ways to compute the same, whatever the type.

    Returns:
        Infinity where the vocabularies are of different sizes.
    """
    ours, theirs = megatron_logits(info, tokens, dtype), transformers_logits(hf_folder, tokens)
    return float(np.abs(ours - theirs).max()) if ours.shape == theirs.shape else math.inf


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


def megatron_logits(info: CheckpointInfo, tokens: Tokens, dtype: str = "float32") -> Logits:
    """Return the logits of Megatron's model in fp32, [batch, sequence, vocabulary].

    The weights are rounded to ``dtype``; they are computed with in fp32 all the same.

    Megatron's loader unpickles parts of a checkpoint without checks: use this on checkpoints of
    your own. It runs in a new process, because Megatron keeps its state in globals and because
    what stands in for CUDA on a CPU changes torch.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_megatron_logits, info, tokens, dtype).result()


def _megatron_logits(info: CheckpointInfo, tokens: Tokens, dtype: str) -> Logits:
    from kaiyuan.megatron.logits import logits

    return logits(info, tokens, dtype)
