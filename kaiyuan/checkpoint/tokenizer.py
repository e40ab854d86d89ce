"""The tokenizer that goes with a model."""

import json
import shutil
from pathlib import Path

from kaiyuan.errors import UserError

FILES = ("merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json")

# The name that Qwen's tokenizers, and those of kaiyuan, give to the end of a document.
END_OF_DOCUMENT = "<|endoftext|>"


def check_tokenizer(folder: Path, vocab_size: int) -> int | None:
    """Check that the model has a row for every id of a tokenizer.

    Returns:
        The id of :data:`END_OF_DOCUMENT`, where the tokenizer has it.

    Raises:
        UserError: files are missing or damaged, or the vocabulary is another one.
    """
    path = folder / "tokenizer.json"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise UserError(f"the tokenizer {folder} lacks {name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        added = {token["content"]: token["id"] for token in content["added_tokens"]}
        most = max([*content["model"]["vocab"].values(), *added.values()])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a byte-level BPE tokenizer: {error}") from error
    if most >= vocab_size:
        raise UserError(
            f"the tokenizer {folder} has ids up to {most:,}, the model has {vocab_size:,} entries: "
            "it was trained with another vocabulary"
        )
    return added.get(END_OF_DOCUMENT)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy those of the four files that the tokenizer has."""
    target.mkdir(exist_ok=True)
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
