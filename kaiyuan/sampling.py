"""How tokens are chosen, and what a request for text must be like; of every engine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kaiyuan.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        max_new_tokens: at most so many tokens; the end of a document ends the text before.
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: sample among the likeliest tokens that together have this probability.
        seed: of the sampling, below 2**63.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raise a UserError when a value makes no sense."""
        if self.max_new_tokens < 1:
            raise UserError(f"max-new-tokens must be at least 1, not {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature must be a number from 0 on, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p must be above 0 and at most 1, not {self.top_p}")
        if self.top_p < 1 and self.temperature == 0:
            raise UserError("top-p samples: give --temperature as well")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be a whole number from 0 to 2**63 - 1, not {self.seed}")


def check_prompts(prompts: Sequence[str]) -> None:
    """Raise a UserError when there is nothing to continue, or something that is no text."""
    if not prompts or not all(prompts):
        raise UserError("there is an empty prompt: give at least one character")
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:  # bytes of the command line that are not UTF-8
            raise UserError(f"the prompt {prompt!r} is not UTF-8") from None


def check_length(needed: int, most: int) -> None:
    """Raise a UserError when a prompt and what follows it are too long for the model.

    Args:
        needed: tokens of both.
        most: positions that the model has.
    """
    if needed > most:
        raise UserError(
            f"prompt and new tokens make {needed:,} tokens, the model was trained on {most:,}: "
            "shorten the prompt or ask for fewer new tokens"
        )
