"""The loss of every checkpoint of a run on data that it was not trained on."""

import csv
import math
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from kaiyuan.checkpoint.describe import (
    CheckpointInfo,
    describe_checkpoint,
    iteration_folder,
    iterations,
)
from kaiyuan.checkpoint.export import hf_tensors
from kaiyuan.checkpoint.hf_config import model_class, sizes_of, to_config
from kaiyuan.checkpoint.load import ModelTensors, TorchDistCheckpoint
from kaiyuan.checkpoint.names import EMBEDDING
from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.data.samples import OrderedDataset
from kaiyuan.data.tokenizer import load_tokenizer
from kaiyuan.errors import UserError
from kaiyuan.files import atomic_write
from kaiyuan.runfolder import CHECKPOINTS, recorded

# Logits of so many positions at a time: 0.6 GB in fp32 at Kaiyuan-2B's vocabulary.
_POSITIONS = 1024


@dataclass(frozen=True)
class Point:
    """One checkpoint of the curve.

    Attributes:
        iteration: optimizer steps behind the checkpoint.
        loss: mean cross-entropy in nats a token, the end of each document being a token.
        bits_per_byte: the same in bits, over the bytes of the text in UTF-8; unlike the loss it
            can be compared between tokenizers.
    """

    iteration: int
    loss: float
    bits_per_byte: float


class Validation:
    """What is to be measured, checked before the first model is loaded.

    Attributes:
        name: of the files that are written, without the suffix: of the data, its content and the
            number of samples.
        trained_on: the run was trained on this very data.
    """

    def __init__(self, run: Path, data: Path, num_samples: int | None = None) -> None:
        """Find the checkpoints and cut the data into samples as training does.

        Args:
            run: a run or its folder ``checkpoints``, of which all are measured; the folder of one
                iteration, or what ``kaiyuan average`` or ``kaiyuan import`` made.
            data: folder of a converted phase.
            num_samples: so many samples, evenly over the data; all by default.

        Raises:
            UserError: there is no checkpoint, or the data is of another tokenizer or too short.
        """
        self.checkpoints, home = _measured(run)
        self.phase = ConvertedPhase.open(data)
        _check_tokenizer(
            self.phase, self.checkpoints[-1], (recorded(home) or {}).get("tokenizer_hash")
        )
        self.phases = self.checkpoints[-1].history.get("phases", [])
        self.trained_on = self.phase.content_hash in [p["content_hash"] for p in self.phases]
        self.dataset = OrderedDataset(self.phase, self.checkpoints[-1].model["seq_length"])
        count = min(num_samples or len(self.dataset), len(self.dataset))
        # Evenly, because the order of a phase goes from worse to better text.
        self.samples = [i * len(self.dataset) // count for i in range(count)]
        # Of what was measured, so that another measurement does not take its place.
        content = self.phase.content_hash[:8]
        one = f"{run.name}-" if self.checkpoints[0].folder == run else ""
        self.name = home / f"validation-{one}{data.resolve().name}-{content}-{count}"

    def __iter__(self) -> Iterator[Point]:
        """Measure one checkpoint after another, with documents kept apart where training did."""
        for info in self.checkpoints:
            self.dataset.reset_positions = _documents_apart(self.phases, info.iteration)
            loss = mean_loss(load_model(info), self.dataset, self.samples)
            counts = self.phase.manifest["counts"]
            bits = loss / math.log(2) * counts["tokens"] / counts["text_bytes"]
            yield Point(info.iteration, loss, bits)


def _measured(path: Path) -> tuple[list[CheckpointInfo], Path]:
    """Return the checkpoints that a path is of, and the folder that gets what was measured."""
    info = describe_checkpoint(path)
    folder = info.folder.parent
    found = [] if info.folder == path else iterations(folder)
    checkpoints = [describe_checkpoint(iteration_folder(folder, i)) for i in found] or [info]
    return checkpoints, folder.parent if folder.name == CHECKPOINTS else folder


def _documents_apart(phases: list[dict[str, Any]], iteration: int) -> bool:
    """Return whether the phase that ended with, or was in, an iteration kept documents apart."""
    steps = 0
    for phase in phases:
        steps += phase["steps"]
        if iteration <= steps:
            return bool(phase["arguments"].get("reset_attention_mask"))
    return False


def _check_tokenizer(phase: ConvertedPhase, info: CheckpointInfo, expected: str | None) -> None:
    has = phase.manifest["tokenizer"]["hash"]
    if expected is None and info.tokenizer:
        expected = load_tokenizer(info.tokenizer).hash
    if (expected and has != expected) or phase.vocab_size > info.vocab_size:
        raise UserError(
            f"{phase.folder} was converted with another tokenizer than the run's data: convert "
            "the text again with the run's own"
        )


def load_model(info: CheckpointInfo) -> Any:
    """Return transformers' model with the weights of a checkpoint; nothing is written.

    On a GPU in bf16, or in fp16 where it was trained so; on a CPU in fp32.

    Raises:
        UserError: as :func:`kaiyuan.checkpoint.export.export`.
    """
    transformers_logging.disable_progress_bar()
    checkpoint = TorchDistCheckpoint(info.folder)
    cuda = torch.cuda.is_available()
    dtype = "float32"
    if cuda:
        fp16 = checkpoint.tensors[EMBEDDING.megatron].dtype == torch.float16
        dtype = "float16" if fp16 else "bfloat16"
    kind = model_class(info)
    model = kind.from_pretrained(
        None,
        config=kind.config_class(**to_config(info, dtype, None)),
        state_dict=dict(hf_tensors(ModelTensors(checkpoint, sizes_of(info)))),
        dtype=getattr(torch, dtype),
    )
    return model.to("cuda" if cuda else "cpu").eval()


def mean_loss(model: Any, dataset: OrderedDataset, samples: list[int]) -> float:
    """Return the mean cross-entropy of samples, nats a token.

    Args:
        model: transformers' causal language model.
        dataset: where the samples come from; where its positions begin anew with each document, no
            token attends to another document.
        samples: their numbers.
    """
    total = 0.0
    size = max(1, _POSITIONS // dataset.sequence_length)
    with torch.inference_mode():
        for first in range(0, len(samples), size):
            batch = [dataset[number] for number in samples[first : first + size]]
            ids, positions, labels = (
                torch.stack([sample[name] for sample in batch]).to(model.device)
                for name in ("tokens", "position_ids", "labels")
            )
            # Without a cache transformers takes positions that begin anew for another document.
            out = model.model(ids, position_ids=positions, use_cache=False)
            hidden, labels = out.last_hidden_state.flatten(0, 1), labels.flatten()
            for begin in range(0, len(labels), _POSITIONS):
                part = slice(begin, begin + _POSITIONS)
                logits = model.lm_head(hidden[part]).float()
                total += torch.nn.functional.cross_entropy(
                    logits, labels[part], reduction="sum"
                ).item()
    return total / (len(samples) * dataset.sequence_length)


def write_points(points: list[Point], path: Path) -> None:
    """Write a CSV, a line a checkpoint; the columns are the attributes of `Point`."""
    with atomic_write(path, "w") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(field.name for field in fields(Point))
        writer.writerows(astuple(point) for point in points)


def draw_points(points: list[Point], picture: Path) -> None:
    """Write a PNG of loss and bits per byte over iterations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, sharex=True, figsize=(8, 6), layout="constrained")
    steps = [point.iteration for point in points]
    for axis, name, unit in zip(
        axes, ("loss", "bits_per_byte"), ("loss (nats a token)", "bits per byte"), strict=True
    ):
        axis.plot(steps, [asdict(point)[name] for point in points], marker=".")
        axis.set_ylabel(unit)
    axes[-1].set_xlabel("iteration")
    with atomic_write(picture) as stream:
        figure.savefig(stream, format="png", dpi=120)
    pyplot.close(figure)
