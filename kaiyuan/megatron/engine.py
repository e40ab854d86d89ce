"""Megatron's inference engine on our model; see kaiyuan/generate_megatron.py.

Of its two ways of batching the static one is used: keys and values lie in one tensor a layer and
attention is that of our layers. The dynamic one (pages of keys and values) calls flash-attn itself
and runs on nothing else.

The engine is asked directly and not through ``text_generation_server.run_mcore_engine``. That
function takes the generated ids for a tensor, which they are in the static way only; it drops the
seed of some requests and the stop token of all.
"""

import contextlib
import io
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines import StaticInferenceEngine
from megatron.core.inference.inference_request import InferenceRequest
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)
from megatron.core.inference.utils import InferenceMode
from torch import Tensor

from kaiyuan.checkpoint.describe import CheckpointInfo
from kaiyuan.megatron.logits import load_model, quiet, stored_dtype
from kaiyuan.sampling import Sampling


class Engine:
    """A checkpoint, loaded in its own precision and ready to be continued from.

    Args:
        info: the checkpoint.
        end_of_document: the token that ends a text; None for no such token.
    """

    def __init__(self, info: CheckpointInfo, end_of_document: int | None) -> None:
        quiet()
        self._model = load_model(info, stored_dtype(info))
        self._vocab_size = info.vocab_size
        self._tokenizer = _NoText(end_of_document)

    def continue_tokens(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, batch_size: int
    ) -> list[list[int]]:
        """Return the ids that follow each prompt, without the end of the document.

        Args:
            prompts: ids, [prompt][token], of any lengths.
            sampling: how to choose the tokens.
            batch_size: so many prompts at once.
        """
        longest = max(map(len, prompts)) + sampling.max_new_tokens
        context = StaticInferenceContext(min(batch_size, len(prompts)), longest)
        model = _WithoutPadding(self._model, context)
        model.num_ids = self._vocab_size
        controller = TextGenerationController(model, self._tokenizer)
        controller.sampling_rng.manual_seed(sampling.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it announces its end in versions to come
            engine = StaticInferenceEngine(controller, legacy=True)
        requests = [
            InferenceRequest(
                request_id=engine.get_new_request_id(),
                prompt="",
                prompt_tokens=list(prompt),
                sampling_params=_parameters(sampling),
            )
            for prompt in prompts
        ]
        # The engine has switched the mode of the whole process; afterwards it is as it was. The bar
        # that it draws of the requests would stand between the texts.
        with InferenceMode.active(), contextlib.redirect_stderr(io.StringIO()):
            done = engine.generate(inference_requests=requests)
        return [_ids(request.generated_tokens) for request in done]


class _WithoutPadding(GPTInferenceWrapper):
    """The model without the ids that Megatron pads its vocabulary with: nothing trains them."""

    num_ids: int

    def run_one_forward_step(
        self, inference_input: dict[str, Any], recv_buffer_seq_len: int | None = None
    ) -> Tensor:
        """Return the logits in fp32, [batch, 1, vocabulary without padding]."""
        logits = super().run_one_forward_step(inference_input, recv_buffer_seq_len)
        return logits[..., : self.num_ids].float()


class _NoText:
    """What the engine asks of a tokenizer, where ids go in and out.

    Attributes:
        eod: the token that ends a text. The engine also fills rows with it, up to where tokens
            are yet to come, so it must be a number; -1 is never chosen.
    """

    bos = None

    def __init__(self, end_of_document: int | None) -> None:
        self.eod = -1 if end_of_document is None else end_of_document

    def detokenize(self, _ids: list[int]) -> str:
        return ""


def _parameters(sampling: Sampling) -> SamplingParams:
    if sampling.temperature == 0:
        return SamplingParams(top_k=1, num_tokens_to_generate=sampling.max_new_tokens)
    return SamplingParams(
        temperature=sampling.temperature,
        # 0 switches it off, which spares the sorting.
        top_p=sampling.top_p if sampling.top_p < 1 else 0.0,
        num_tokens_to_generate=sampling.max_new_tokens,
    )


def _ids(tokens: Tensor | list[int]) -> list[int]:
    return tokens.tolist() if torch.is_tensor(tokens) else list(tokens)
