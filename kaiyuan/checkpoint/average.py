"""The mean of checkpoints.

The weights that the authors of Kaiyuan-2B published are the equal mean of the last eight
checkpoints of the training (docs/alignment.md).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kaiyuan.checkpoint.describe import (
    checkpoints_folder,
    describe_checkpoint,
    iteration_folder,
    iterations,
)
from kaiyuan.checkpoint.hf_config import sizes_of
from kaiyuan.checkpoint.load import ModelTensors, TorchDistCheckpoint
from kaiyuan.checkpoint.names import Entry
from kaiyuan.checkpoint.save import write_checkpoint
from kaiyuan.errors import UserError

_BLOCK = 1 << 20


def choose(path: Path, last: int | None, wanted: Sequence[int] = ()) -> list[int]:
    """Return the iterations to average, in order.

    Args:
        path: a run, or its folder ``checkpoints``.
        last: so many of the newest.
        wanted: these instead.

    Raises:
        UserError: there are not so many, one of them is not there, or both ways are used.
    """
    if wanted and last is not None:
        raise UserError("--last and --iterations exclude each other: give one of them")
    there = iterations(checkpoints_folder(path))
    names = ", ".join(map(str, there)) or "none"
    if wanted:
        lacking = [i for i in wanted if i not in there]
        if lacking or len(set(wanted)) != len(wanted):
            wrong = f"no checkpoint {lacking[0]}" if lacking else "not each of them once"
            raise UserError(f"{path} has {wrong}: there are {names}")
        return sorted(wanted)
    if last is None or last < 1:
        raise UserError("say how many checkpoints to average (--last 8), or which (--iterations)")
    if last > len(there):
        raise UserError(f"{path} has {len(there)} complete checkpoints, not {last}: {names}")
    return there[-last:]


def weights_of(number: int, decay: float = 1.0) -> list[float]:
    """Return the weights of checkpoints, oldest first; they sum to 1.

    Args:
        number: of checkpoints.
        decay: weight of a checkpoint over that of the next newer one; 1 is the equal mean.
    """
    if not 0 < decay <= 1:
        raise UserError(f"decay must be above 0 and at most 1, not {decay}")
    powers = [decay**age for age in reversed(range(number))]
    return [power / sum(powers) for power in powers]


def average(
    path: Path, chosen: Sequence[int], output: Path, decay: float = 1.0, **description: Any
) -> dict[str, Any]:
    """Write the weighted mean of checkpoints of one run as a checkpoint of its own.

    Sums are kept in float64 and rounded once, to fp32. Tensors pass one by one, so that the memory
    needed is about three times the largest of them in fp32.

    Args:
        path: the run, or its folder ``checkpoints``.
        chosen: iterations; see :func:`choose`.
        output: the folder to make.
        decay: see :func:`weights_of`.
        description: as for ``describe_checkpoint``, where there is no run.json.

    Returns:
        The manifest of the new checkpoint.

    Raises:
        UserError: a checkpoint is not complete or not of the same model, or ``output`` exists.
    """
    folder = checkpoints_folder(path)
    newest = describe_checkpoint(iteration_folder(folder, chosen[-1]), **description)
    sizes = sizes_of(newest)
    sources = [
        ModelTensors(TorchDistCheckpoint(iteration_folder(folder, i)), sizes) for i in chosen
    ]
    weights = weights_of(len(chosen), decay)

    def read(entry: Entry) -> Tensor:
        total = torch.zeros(entry.megatron_shape, dtype=torch.float64)
        for source, weight in zip(sources, weights, strict=True):
            _add(total, source.read(entry), weight)
        return total.float()

    averaged = {"iterations": list(chosen), "weights": weights}
    history = newest.history | {"averaged": averaged}
    return write_checkpoint(output, dataclasses.replace(newest, history=history), read)


def _add(total: Tensor, tensor: Tensor, weight: float) -> None:
    # In blocks, because torch casts the whole of the smaller type before it adds.
    blocks = zip(total.view(-1).split(_BLOCK), tensor.reshape(-1).split(_BLOCK), strict=True)
    for block, addend in blocks:
        block.add_(addend, alpha=weight)
