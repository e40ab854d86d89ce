"""The tokenizer that goes with a model."""

from pathlib import Path

from kaiyuan.checkpoint.describe import CheckpointInfo
from kaiyuan.data.tokenizer import ENDOFTEXT, load_tokenizer, write_files
from kaiyuan.errors import UserError


def check_tokenizer(folder: Path, vocab_size: int) -> int | None:
    """Check that the four files are whole and that the model has a row for every id.

    Returns:
        The id of ``<|endoftext|>``, where the tokenizer has it.

    Raises:
        UserError: files are missing or disagree, or the vocabulary is another one.
    """
    info = load_tokenizer(folder)
    if info.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer {folder} has ids up to {info.vocab_size - 1:,}, the model has "
            f"{vocab_size:,} entries: it was trained with another vocabulary"
        )
    return info.tokens.get(ENDOFTEXT)


def tokenizer_of(info: CheckpointInfo) -> tuple[Path, int | None]:
    """Return the folder of a checkpoint's tokenizer and the token that ends a document.

    Raises:
        UserError: no tokenizer is known, or it does not fit; see :func:`check_tokenizer`.
    """
    if info.tokenizer is None:
        raise UserError(f"no tokenizer is known for {info.folder}: give --tokenizer DIR")
    named_end = check_tokenizer(info.tokenizer, info.vocab_size)
    return info.tokenizer, info.history.get("end_of_document_id", named_end)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the four files, or make those that a model of Hugging Face came without."""
    target.mkdir(exist_ok=True)
    write_files(source, target)
