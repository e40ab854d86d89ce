"""Times and memory of some training steps, in the very process that trains.

Run through kaiyuan/rank.py with ``--measure-to FILE``; see kaiyuan/profiling/sweep.py.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import megatron.training.training as training
import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args
from torch import Tensor

from kaiyuan.files import write_json
from kaiyuan.megatron import cpu

# Step 1 compiles kernels and makes the optimizer's states, step 2 tells how long a step is, and
# step 3 brings the GPU back to its pace after that.
WARM_UP = 3
_FEWEST, _MOST = 3, 50
RANDOM = "random"  # as --data-path


# Tokens of a random document, on average: the published data have 2.2e12 tokens in 2.09e9 rows.
_DOCUMENT = 1000


def random_samples(length: int, vocab_size: int, apart: bool = False) -> Any:
    """Return a dataset of uniformly random tokens.

    Args:
        length: of a sample, in tokens.
        vocab_size: the tokens are below it.
        apart: documents are kept apart: positions begin anew at random places.
    """

    class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            generator = torch.Generator().manual_seed(index)
            stream = torch.randint(0, vocab_size, (length + 1,), generator=generator)
            positions = torch.arange(length)
            if apart:
                begins = torch.rand(length, generator=generator) < 1 / _DOCUMENT
                positions = positions - (positions * begins).cummax(0).values
            return {
                "tokens": stream[:-1].contiguous(),
                "labels": stream[1:].contiguous(),
                "loss_mask": torch.ones(length),
                "position_ids": positions,
            }

    return Samples()


def provide_random(
    _num_samples: Sequence[int], vp_stage: int | None = None
) -> tuple[Any, None, None]:
    """Provide random samples in place of a phase."""
    args = get_args()
    samples = random_samples(args.seq_length, args.padded_vocab_size, args.reset_attention_mask)
    return samples, None, None


provide_random.is_distributed = True  # type: ignore[attr-defined]


class Stopwatch:
    """Times training steps, and within them when each micro-batch begins.

    Nothing waits for a step that is measured, as in a training that seldom logs.

    Args:
        seconds: to measure, after the warm-up; the training ends then.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.ends: list[Any] = []  # a mark after each step
        self.begins: list[list[Any]] = []  # of each step, a mark before each micro-batch
        self.loss: Any = None
        self.step = training.train_step

    def install(self) -> None:
        """Wrap Megatron's training step."""
        training.train_step = self.timed

    def timed(self, *args: Any, **kwargs: Any) -> Any:
        """Do a step."""
        self.begins.append([])
        out = self.step(*args, **kwargs)
        self.ends.append(_mark())
        if out[0]:  # on the last pipeline stage
            self.loss = out[0]["lm loss"]
        if len(self.ends) == WARM_UP - 1:
            get_args().train_iters = WARM_UP + self.steps_to_measure()
        return out

    def forward(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward step that marks its beginning."""

        def marked(batches: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> Any:
            self.begins[-1].append(_mark())
            return step(batches, model)

        return marked

    def steps_to_measure(self) -> int:
        """Return the same number on all ranks."""
        torch.cuda.synchronize()
        last = between(self.ends[-2], self.ends[-1])
        number = min(max(_FEWEST, math.ceil(self.seconds / last)), _MOST)
        agreed = torch.tensor([number], device=torch.cuda.current_device())
        torch.distributed.broadcast(agreed, 0)
        return int(agreed)

    def result(self) -> dict[str, Any]:
        """Return what was measured on this rank.

        ``steps`` are seconds, ``micro_batches`` a step's number of them, ``micro_batch`` the median
        seconds from the beginning of one to that of the next (None where there is but one), and
        ``loss`` is of the last step, in nats.
        """
        torch.cuda.synchronize()
        chunks = get_args().virtual_pipeline_model_parallel_size or 1
        measured = self.begins[WARM_UP:]
        times = [between(*pair) for begins in measured for pair in pairwise(begins)]
        return {
            "steps": [between(*pair) for pair in pairwise(self.ends[WARM_UP - 1 :])],
            "micro_batches": get_num_microbatches(),
            "micro_batch": statistics.median(times) * chunks if times else None,
            "loss": None if self.loss is None else float(self.loss.flatten()[0]),
            "memory": _memory(),
        }

    def write(self, path: Path) -> None:
        """Write the result of rank 0, with the memory of all ranks, as JSON."""
        own = self.result()
        results: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(results, own)
        if torch.distributed.get_rank() == 0:
            losses = [each["loss"] for each in results if each["loss"] is not None]
            memory = [each["memory"] for each in results]
            device = torch.cuda.get_device_name()
            write_json(path, {**own, "loss": losses[-1], "memory": memory, "device": device})


def _mark() -> Any:
    if cpu.is_active():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, second: Any) -> float:
    """Return the seconds between two marks that have been passed."""
    return second - first if cpu.is_active() else first.elapsed_time(second) / 1e3


def _memory() -> dict[str, int]:
    """Return bytes at their peak: what tensors took, and what torch held for them."""
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
