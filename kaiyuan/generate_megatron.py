"""Continue texts with a checkpoint as it is, through Megatron's own inference engine."""

import importlib.util
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from kaiyuan.checkpoint.describe import CheckpointInfo
from kaiyuan.checkpoint.hf_config import canonical_model, sizes_of
from kaiyuan.checkpoint.load import ModelTensors, TorchDistCheckpoint
from kaiyuan.checkpoint.tokenizer import tokenizer_of
from kaiyuan.errors import UserError
from kaiyuan.sampling import Sampling, check_length, check_prompts

Tokens = Sequence[Sequence[int]]


def generate_with_megatron(
    info: CheckpointInfo,
    prompts: Sequence[str],
    sampling: Sampling,
    batch_size: int = 8,
) -> list[str]:
    """Continue each prompt; see :func:`kaiyuan.generate.generate` for the arguments.

    Greedy texts are those of transformers on the exported weights. Sampled ones are not: the
    engines draw their random numbers differently.

    Raises:
        UserError: Megatron is not installed, the checkpoint is not whole, no tokenizer that fits is
            known, a prompt is empty or too long, or the sampling makes no sense.
    """
    sampling.check()
    check_prompts(prompts)
    if importlib.util.find_spec("megatron") is None:
        raise UserError("megatron-core is not installed: pip install 'kaiyuan[train]'")
    folder, end_of_document = tokenizer_of(info)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(list(prompts))["input_ids"]
    longest = max(map(len, ids)) + sampling.max_new_tokens
    check_length(longest, canonical_model(info.model)["max_position_embeddings"])
    ModelTensors(TorchDistCheckpoint(info.folder), sizes_of(info))  # refuses what does not fit
    new = continue_tokens(info, ids, sampling, batch_size, end_of_document)
    return tokenizer.batch_decode(new, skip_special_tokens=True)


def continue_tokens(
    info: CheckpointInfo,
    prompts: Tokens,
    sampling: Sampling,
    batch_size: int = 8,
    end_of_document: int | None = None,
) -> list[list[int]]:
    """Continue each prompt, on the GPU where there is one.

    Megatron's loader unpickles parts of a checkpoint without checks: use this on checkpoints of
    your own. It runs in a new process; see :func:`kaiyuan.checkpoint.parity.megatron_logits`.

    Args:
        info: the checkpoint.
        prompts: ids, [prompt][token], of any lengths.
        sampling: how to choose the tokens.
        batch_size: so many prompts at once.
        end_of_document: the token that ends a text; without it all have ``max_new_tokens``.

    Returns:
        The ids that follow each prompt, without the prompt and without ``end_of_document``.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        job = pool.submit(_continue, info, prompts, sampling, batch_size, end_of_document)
        return job.result()


def _continue(
    info: CheckpointInfo,
    prompts: Tokens,
    sampling: Sampling,
    batch_size: int,
    end_of_document: int | None,
) -> list[list[int]]:
    from kaiyuan.megatron.engine import Engine

    return Engine(info, end_of_document).continue_tokens(prompts, sampling, batch_size)
