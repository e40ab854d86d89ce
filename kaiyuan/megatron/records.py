"""One line an iteration: what was trained on, and how it went."""

import contextlib
import csv
import datetime
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.training.training as training
import torch
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

from kaiyuan import __version__
from kaiyuan.errors import UserError
from kaiyuan.estimate import flops_per_token, peak_tflops
from kaiyuan.files import atomic_write
from kaiyuan.rank import STEP_MARK
from kaiyuan.starts import Start, add_start

COLUMNS = (
    "iteration",
    "phase",
    "samples",  # consumed over all phases after this iteration
    "tokens",
    "loss",  # mean cross-entropy of the iteration's tokens, nats
    "learning_rate",  # after this iteration: the next one is taken with it
    "grad_norm",  # before clipping; empty where the step was skipped
    "seconds",  # since the iteration before; empty for the first of a process
    "phase_samples",  # consumed of this phase's data: the position in it, in samples
    "tokens_per_second",  # of all GPUs together
    "tflops",  # a GPU and second; kaiyuan.estimate.flops_per_token has the convention
    "mfu",  # share of the GPU's peak in bf16; empty where the GPU is not known
)
# A loss is compared with the median of so many steps before it, at least so many.
_WINDOW, _ENOUGH = 100, 10
# The launcher hears of a step at most so often, beside those that are due for a line in a log and
# the last of a phase.
_SHOW_SECONDS = 0.5
_LAYOUT = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
    "params_dtype",
    "transformer_impl",
)
# What computes, where it is installed.
_PACKAGES = (
    "torch",
    "megatron-core",
    "transformer-engine",
    "triton",
    "flash-attn-4",
)


def install(args: Any) -> None:
    """Record each iteration of the coming training to ``args.record_to``, a CSV file.

    Megatron's ``training_log`` sees the reduced loss of every iteration on the last rank, which
    writes the file, and the same figures to TensorBoard and W&B where they are used.
    """
    recorder = _Recorder(args, training.training_log)
    training.training_log = recorder.log


class _Recorder:
    def __init__(self, args: Any, training_log: Callable[..., Any]) -> None:
        self.args = args
        self.path = Path(args.record_to)
        self.training_log = training_log
        self.last_time: float | None = None
        self.last_shown = 0.0
        self.losses: deque[float] = deque(maxlen=_WINDOW)
        self.flops = flops_per_token(vars(args))
        self.peak = peak_tflops(torch.cuda.get_device_name())

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
        if self.last_time is None:
            kept, gone = forget_after(self.path, iteration - 1)
            # A phase's data may have another loss than those of the phase before.
            same = [row for row in kept if row[COLUMNS.index("phase")] == self.args.phase_name]
            losses = [float(row[COLUMNS.index("loss")]) for row in same[-_WINDOW:]]
            self.losses.extend(filter(math.isfinite, losses))
            add_start(self.path.parent, self._start(iteration, gone))
        seconds = None if self.last_time is None else time.perf_counter() - self.last_time
        speed = self._speed(seconds) if seconds else {}
        samples = self.args.consumed_train_samples
        position = samples - self._steps_before(iteration) * self.args.global_batch_size
        row = (
            iteration,
            self.args.phase_name,
            samples,
            samples * self.args.seq_length,
            f"{loss:.9g}",
            f"{learning_rate or 0:.9g}",
            "" if grad_norm is None else f"{grad_norm:.9g}",
            f"{seconds:.4f}" if seconds else "",
            position,
            *(f"{speed[name]:.4g}" if name in speed else "" for name in COLUMNS[-3:]),
        )
        with self.path.open("a", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerow(row)
        self._show(iteration, loss, learning_rate, seconds, speed)
        self._track(iteration, {**speed, "phase_samples": position})
        self._check_jump(iteration, loss)
        if math.isfinite(loss):
            self.losses.append(loss)
        self.last_time = time.perf_counter()

    def _start(self, iteration: int, gone: list[list[str]]) -> Start:
        seconds = [row[COLUMNS.index("seconds")] for row in gone]
        return Start(
            step=iteration,
            phase=self.args.phase_name,
            time=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
            again=len(gone),
            again_seconds=round(sum(float(text) for text in seconds if text), 1),
            layout={
                name: value if isinstance(value, int) else str(value).removeprefix("torch.")
                for name in _LAYOUT
                if (value := getattr(self.args, name)) is not None
            },
            versions=_versions(),
            device=torch.cuda.get_device_name(),
            data=str(Path(self.args.data_path[0]).absolute()) if self.args.data_path else None,
        )

    def _show(
        self,
        iteration: int,
        loss: float,
        learning_rate: float | None,
        seconds: float | None,
        speed: dict[str, float],
    ) -> None:
        due = iteration % self.args.log_interval == 0
        ends = (*(self.args.phase_transition_iterations or ()), self.args.train_iters)
        now = time.perf_counter()
        if not due and iteration not in ends and now - self.last_shown < _SHOW_SECONDS:
            return
        self.last_shown = now
        step = {
            "step": iteration,
            "loss": loss,
            "learning_rate": learning_rate or 0,
            "seconds": seconds,
            "tokens_per_second": speed.get("tokens_per_second"),
            "mfu": speed.get("mfu"),
            "due": due,
        }
        # In one piece, so that no other rank's line gets into it.
        sys.stdout.write(f"{STEP_MARK}{json.dumps(step)}\n")
        sys.stdout.flush()

    def _steps_before(self, iteration: int) -> int:
        """Return the steps that were done when the phase of an iteration began."""
        return max(
            (t for t in self.args.phase_transition_iterations or () if t < iteration), default=0
        )

    def _speed(self, seconds: float) -> dict[str, float]:
        tokens = self.args.global_batch_size * self.args.seq_length / seconds
        tflops = tokens * self.flops / self.args.world_size / 1e12
        speed = {"tokens_per_second": tokens, "tflops": tflops}
        return speed | ({"mfu": tflops / self.peak} if self.peak else {})

    def _track(self, iteration: int, values: dict[str, float]) -> None:
        named = {f"kaiyuan/{self.args.phase_name}/{name}": v for name, v in values.items()}
        if writer := get_tensorboard_writer():
            for name, value in named.items():
                writer.add_scalar(name, value, iteration)
        if wandb := get_wandb_writer():
            wandb.log(named, iteration)

    def _check_jump(self, iteration: int, loss: float) -> None:
        limit = self.args.max_loss_jump
        if limit is None or len(self.losses) < _ENOUGH:
            return
        usual = statistics.median(self.losses)
        if math.isfinite(loss) and loss <= usual + limit:
            return
        raise UserError(
            f"the loss of step {iteration} is {loss:.3f}, more than max_loss_jump={limit:g} above "
            f"{usual:.3f}, the median of the {len(self.losses)} steps before; nothing was saved "
            f"since the last checkpoint: give the same command again with iterations_to_skip="
            f"[{iteration}] to leave that step's data out, or with a higher max_loss_jump"
        )


def _versions() -> dict[str, str]:
    """Return what computes; an extra that is not installed is left out."""
    found = {"kaiyuan": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def forget_after(path: Path, iteration: int) -> tuple[list[list[str]], list[list[str]]]:
    """Drop the records of iterations that a resumed run does again.

    Args:
        path: the CSV file; it is made, with its header, where it is missing.
        iteration: the last one that stays.

    Returns:
        The records that stay, and those that are dropped.
    """
    rows: list[list[str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as stream:
            rows = [row for row in list(csv.reader(stream))[1:] if len(row) == len(COLUMNS)]
    kept = [row for row in rows if int(row[0]) <= iteration]
    with atomic_write(path, "w") as out:
        csv.writer(out).writerows([COLUMNS, *kept])
    return kept, [row for row in rows if int(row[0]) > iteration]
