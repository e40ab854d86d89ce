"""One line an iteration: what was trained on, and how it went."""

import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.training.training as training
import torch
from megatron.training import get_args

from kaiyuan.files import atomic_write

COLUMNS = (
    "iteration",
    "phase",
    "samples",  # consumed over all phases after this iteration
    "tokens",
    "loss",  # mean cross-entropy of the iteration's tokens, nats
    "learning_rate",
    "grad_norm",  # before clipping
    "seconds",  # since the iteration before; empty for the first of a process
)


def install(path: Path, phase: str) -> None:
    """Record each iteration of the coming training to a CSV file.

    Megatron's ``training_log`` sees the reduced loss of every iteration on the last rank, which
    writes the file.
    """
    recorder = _Recorder(path, phase, training.training_log)
    training.training_log = recorder.log


class _Recorder:
    def __init__(self, path: Path, phase: str, training_log: Callable[..., Any]) -> None:
        self.path = path
        self.phase = phase
        self.training_log = training_log
        self.last_time: float | None = None

    def log(
        self,
        loss_dict: dict[str, torch.Tensor],
        total_loss_dict: dict[str, torch.Tensor],
        learning_rate: float | None,
        iteration: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Write the record, then do what Megatron does."""
        # positions 4 to 7: loss_scale, report_memory_flag, skipped_iter, grad_norm
        grad_norm = args[3]
        if loss_dict and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            self._write(iteration, float(loss_dict["lm loss"]), learning_rate, grad_norm)
        return self.training_log(
            loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs
        )

    def _write(
        self, iteration: int, loss: float, learning_rate: float | None, grad_norm: float | None
    ) -> None:
        now = time.perf_counter()
        if self.last_time is None:
            forget_after(self.path, iteration - 1)
        args = get_args()
        row = (
            iteration,
            self.phase,
            args.consumed_train_samples,
            args.consumed_train_samples * args.seq_length,
            f"{loss:.9g}",
            f"{learning_rate or 0:.9g}",
            "" if grad_norm is None else f"{grad_norm:.9g}",
            "" if self.last_time is None else f"{now - self.last_time:.4f}",
        )
        with self.path.open("a", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerow(row)
        self.last_time = time.perf_counter()


def forget_after(path: Path, iteration: int) -> None:
    """Drop the records of iterations that a resumed run does again.

    Args:
        path: the CSV file; it is made, with its header, where it is missing.
        iteration: the last one that stays.
    """
    kept: list[list[str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as stream:
            rows = list(csv.reader(stream))[1:]
        kept = [row for row in rows if len(row) == len(COLUMNS) and int(row[0]) <= iteration]
    with atomic_write(path, "w") as out:
        csv.writer(out).writerows([COLUMNS, *kept])
