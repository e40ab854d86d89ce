"""Training samples of one phase, in the exact order of the data."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kaiyuan.data.ends import build_ends, document_ends
from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.errors import UserError


class OrderedDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The documents of a phase, end to end in training order, cut into samples.

    Sample ``i`` holds the tokens ``[i * S, (i + 1) * S]`` of that stream, S being the sequence
    length: the first S are the input, the last S the labels. This is how Megatron's GPTDataset
    cuts samples, without its shuffling of documents and samples. The tail that does not fill a
    sample is left out.

    Args:
        phase: the converted data.
        sequence_length: S, in tokens.
        cache: folder for the ends of the documents, see `kaiyuan.data.ends`; without it they are
            held in memory.
        reset_positions: count positions from the beginning of each document, or of the sample
            where that cuts into a document; otherwise from the beginning of the sample.

    Raises:
        UserError: the phase is too short for a single sample.
    """

    def __init__(
        self,
        phase: ConvertedPhase,
        sequence_length: int,
        cache: Path | None = None,
        reset_positions: bool = False,
    ) -> None:
        self.phase = phase
        self.sequence_length = sequence_length
        self.reset_positions = reset_positions
        self.order = phase.order()
        # stream position after each document of the training order
        self.ends: NDArray[np.int64] = (
            np.concatenate([*document_ends(phase)])
            if cache is None
            else np.load(build_ends(phase, cache), mmap_mode="r")
        )
        self.num_samples = (phase.num_tokens - 1) // sequence_length
        if self.num_samples < 1:
            raise UserError(
                f"{phase.folder} has {phase.num_tokens} tokens, too few for one sample of "
                f"{sequence_length}"
            )

    def __len__(self) -> int:
        return self.num_samples

    def documents(self, index: int) -> list[tuple[int, int, int]]:
        """Return what sample ``index`` consists of.

        Returns:
            (global document id, first token, number of tokens) for each piece, in order; the
            numbers add up to the sequence length plus one.
        """
        position = index * self.sequence_length
        missing = self.sequence_length + 1
        place = int(np.searchsorted(self.ends, position, side="right"))
        pieces = []
        while missing:
            document = place if self.order is None else int(self.order[place])
            available = int(self.ends[place]) - position
            count = min(available, missing)
            length = int(self.ends[place] - (self.ends[place - 1] if place else 0))
            if count:
                pieces.append((document, length - available, count))
            position += count
            missing -= count
            place += 1
        return pieces

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return tokens, labels, position_ids (int64) and loss_mask (float32), each of [S]."""
        pieces = self.documents(index)
        parts = [
            self.phase.tokens(document)[first : first + count] for document, first, count in pieces
        ]
        stream = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        positions = torch.arange(self.sequence_length)
        if self.reset_positions:
            counted = torch.cat([torch.arange(count) for _, _, count in pieces])
            positions = counted[: self.sequence_length]
        return {
            "tokens": stream[:-1].contiguous(),
            "labels": stream[1:].contiguous(),
            "loss_mask": torch.ones(self.sequence_length),
            "position_ids": positions,
        }
