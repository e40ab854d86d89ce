"""Export a checkpoint of Megatron to a folder that transformers loads."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from kaiyuan.checkpoint.card import model_card
from kaiyuan.checkpoint.describe import TOKENIZER_FILES, CheckpointInfo
from kaiyuan.checkpoint.hf_config import canonical_model, to_config
from kaiyuan.checkpoint.load import ModelTensors, TorchDistCheckpoint
from kaiyuan.checkpoint.names import Sizes
from kaiyuan.checkpoint.safetensors_io import DTYPES, write_shards
from kaiyuan.errors import UserError
from kaiyuan.files import MANIFEST, atomic_folder, sha256_of, write_manifest

KIND = "hf_model"

# The name that Qwen's tokenizers, and those of kaiyuan, give to the end of a document.
END_OF_DOCUMENT = "<|endoftext|>"


def export(info: CheckpointInfo, output: Path, dtype: str = "bfloat16") -> dict[str, Any]:
    """Write weights, configuration, tokenizer, model card and manifest.

    The same checkpoint gives the same bytes. Tensors pass one by one, so that the memory needed is
    about twice the largest of them (the embedding).

    Args:
        info: the checkpoint; see :func:`~kaiyuan.checkpoint.describe.describe_checkpoint`.
        output: the folder to make; it appears when it is complete.
        dtype: of the weights, "bfloat16" or "float32".

    Returns:
        The manifest.

    Raises:
        UserError: the checkpoint is incomplete, has tensors too many or too few, of other shapes
            or with numbers that are not finite; the tokenizer does not fit; ``output`` exists.
            Nothing is written then.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype}")
    if info.tokenizer is None:
        raise UserError(f"no tokenizer is known for {info.folder}: give --tokenizer DIR")
    end_of_document = check_tokenizer(info.tokenizer, info)
    config = to_config(info, dtype, end_of_document)
    sizes = Sizes.from_arguments(canonical_model(info.model), info.vocab_size)
    tensors = ModelTensors(TorchDistCheckpoint(info.folder), sizes)
    shapes = {n: s for e in tensors for n, s in zip(e.hf_names, e.hf_shapes, strict=True)}
    with atomic_folder(output) as folder:
        hashes = write_shards(folder, _hf_tensors(tensors), shapes, DTYPES[dtype])
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", _generation_config(end_of_document))
        copy_tokenizer(info.tokenizer, folder)
        (folder / "README.md").write_text(model_card(info, dtype), encoding="utf-8")
        return write_manifest(folder, KIND, _manifest(folder, info, dtype, hashes))


def _hf_tensors(tensors: ModelTensors) -> Iterator[tuple[str, Tensor]]:
    for entry in tensors:
        yield from zip(entry.hf_names, entry.split(tensors.read(entry)), strict=True)


def _generation_config(end_of_document: int | None) -> dict[str, Any]:
    # Batches are padded with the end of a document too; the attention mask hides it.
    return {"do_sample": False, "eos_token_id": end_of_document, "pad_token_id": end_of_document}


def _manifest(
    folder: Path, info: CheckpointInfo, dtype: str, hashes: dict[str, str]
) -> dict[str, Any]:
    files = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    return {
        "iteration": info.iteration,
        "model": canonical_model(info.model),
        "vocab_size": info.vocab_size,
        "dtype": dtype,
        **info.history,
        "files": {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": hashes.get(path.name) or sha256_of(path),
            }
            for path in files
        },
    }


def check_tokenizer(folder: Path, info: CheckpointInfo) -> int | None:
    """Check that the model has a row for every id of a tokenizer.

    Returns:
        The id that ends a document: the one of the run, or else the one that the tokenizer has
        for :data:`END_OF_DOCUMENT`, if any.

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
        ids = [*content["model"]["vocab"].values(), *added.values()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a byte-level BPE tokenizer: {error}") from error
    if max(ids) >= info.vocab_size:
        raise UserError(
            f"the tokenizer {folder} has ids up to {max(ids):,}, "
            f"the model has {info.vocab_size:,} entries: it was trained with another vocabulary"
        )
    return info.history.get("end_of_document_id", added.get(END_OF_DOCUMENT))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy those of the four files that the tokenizer has."""
    target.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
