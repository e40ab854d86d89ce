"""Find a checkpoint and what is known of it: its model, vocabulary, tokenizer and history."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kaiyuan.errors import UserError
from kaiyuan.files import MANIFEST, read_manifest
from kaiyuan.runfolder import CHECKPOINTS, RUN_FILE, TRACKER

# What Megatron's tracker file names in place of an iteration: the folder of weights that are the
# start of a training and not a point of it.
RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint.

    Attributes:
        folder: where its data files are.
        iteration: optimizer steps behind it; 0 for weights that were imported.
        model: Megatron's argument names and values.
        vocab_size: rows of the embedding, without Megatron's padding.
        tokenizer: folder of the tokenizer, where one is known.
        history: what else the run wrote down; see :data:`HISTORY`.
    """

    folder: Path
    iteration: int
    model: dict[str, Any]
    vocab_size: int
    tokenizer: Path | None
    history: dict[str, Any] = field(default_factory=dict)


# Carried from a run into what is made of its checkpoints, where the run has them:
# phases: for each phase its name, the hash of its data, its tokens, samples, steps and arguments.
# averaged: the iterations and weights of which the checkpoint is the mean.
# grades: for an argument, how well its value is known (see docs/alignment.md).
# end_of_document_id: the token after each document.
HISTORY = ("phases", "averaged", "grades", "end_of_document_id")


def describe_checkpoint(
    path: Path,
    model: Path | None = None,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
) -> CheckpointInfo:
    """Find out which checkpoint is meant and what model it is of.

    Args:
        path: a run, its folder ``checkpoints``, the folder of one iteration, or what
            ``kaiyuan average`` or ``kaiyuan import`` made. Of several iterations the one is taken
            that Megatron would load.
        model: file of Megatron arguments, for a checkpoint that kaiyuan did not train.
        vocab_size: the same for the rows of the embedding.
        tokenizer: folder of the tokenizer; takes the place of the run's own.

    Raises:
        UserError: there is no complete checkpoint, or what it is of is not known.
    """
    folder = _iteration_folder(path)
    described = _description(folder)
    if described is None and (model is None or vocab_size is None):
        raise UserError(
            f"nothing near {folder} says what model it is (there is no {RUN_FILE}): "
            "give --model FILE and --vocab-size N"
        )
    home, known = described or (folder, {})
    if tokenizer is None and known.get("tokenizer"):
        tokenizer = home / known["tokenizer"]
    match = _ITERATION.fullmatch(folder.name)
    return CheckpointInfo(
        folder=folder,
        iteration=int(match[1]) if match else known.get("iteration", 0),
        model=_read_model(model) if model else known["model"],
        vocab_size=vocab_size or known["vocab_size"],
        tokenizer=tokenizer,
        history={key: known[key] for key in HISTORY if key in known},
    )


def checkpoints_folder(path: Path) -> Path:
    """Return the folder of the iterations of a run: ``path/checkpoints``, or ``path`` itself.

    Raises:
        UserError: there are none.
    """
    for folder in (path / CHECKPOINTS, path):
        if (folder / TRACKER).is_file():
            return folder
    if not path.exists():
        raise UserError(f"{path} does not exist")
    raise UserError(f"{path} holds no complete checkpoint: it has no {TRACKER}")


def iterations(folder: Path) -> list[int]:
    """Return the complete iterations in a folder of checkpoints, in order.

    Megatron names an iteration in its tracker file when all ranks have written it; a later folder
    is one that was being written when the training ended.
    """
    latest = _latest(folder)
    found = [int(m[1]) for p in folder.iterdir() if (m := _ITERATION.fullmatch(p.name))]
    return sorted(i for i in found if latest is None or i <= latest)


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Return the folder of an iteration."""
    return folder / f"iter_{iteration:07d}"


def _iteration_folder(path: Path) -> Path:
    if _ITERATION.fullmatch(path.name) or path.name == RELEASE or (path / ".metadata").is_file():
        return path
    return megatrons_choice(checkpoints_folder(path))


def megatrons_choice(folder: Path) -> Path:
    """Return the one that Megatron would load of a folder of checkpoints.

    Raises:
        UserError: there is none.
    """
    if not (folder / TRACKER).is_file():
        raise UserError(f"{folder} holds no complete checkpoint: it has no {TRACKER}")
    latest = _latest(folder)
    return folder / RELEASE if latest is None else iteration_folder(folder, latest)


def _latest(folder: Path) -> int | None:
    """Return the iteration that the tracker file names; None for a release."""
    text = (folder / TRACKER).read_text().strip()
    if text != RELEASE and not text.isdecimal():
        raise UserError(f"{folder / TRACKER} does not hold the number of an iteration: {text!r}")
    return None if text == RELEASE else int(text)


def _description(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder of the description and its content."""
    described = ((folder.parent, "checkpoint", MANIFEST), (folder.parent.parent, "run", RUN_FILE))
    for home, kind, name in described:
        if (home / name).is_file():
            return home, read_manifest(home, kind, name)
    return None


def _read_model(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise UserError(f"{path} does not hold names and values of Megatron's arguments")
    return {str(key).replace("-", "_"): value for key, value in content.items()}
