"""Export a checkpoint of Megatron to a folder that transformers loads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from kaiyuan.checkpoint.card import model_card
from kaiyuan.checkpoint.describe import CheckpointInfo
from kaiyuan.checkpoint.hf_config import (
    VARIANT_CODE,
    canonical_model,
    is_variant,
    sizes_of,
    to_config,
)
from kaiyuan.checkpoint.load import ModelTensors, TorchDistCheckpoint
from kaiyuan.checkpoint.safetensors_io import DTYPES, write_shards
from kaiyuan.checkpoint.tokenizer import copy_tokenizer, tokenizer_of
from kaiyuan.errors import UserError
from kaiyuan.files import atomic_folder, sha256_of, write_json, write_manifest

KIND = "hf_model"


def export(info: CheckpointInfo, output: Path, dtype: str = "bfloat16") -> dict[str, Any]:
    """Write weights, configuration, tokenizer, model card and manifest.

    A KaiyuanForCausalLM, which transformers does not have, comes with its code.

    The same checkpoint gives the same bytes. Tensors pass one by one, so that the memory needed is
    about twice the largest of them (the embedding).

    Args:
        info: the checkpoint; see :func:`~kaiyuan.checkpoint.describe.describe_checkpoint`.
        output: the folder to make; it appears when it is complete.
        dtype: of the weights, "bfloat16", "float16" or "float32".

    Returns:
        The manifest.

    Raises:
        UserError: the checkpoint is incomplete, has tensors too many or too few, of other shapes
            or with numbers that are not finite; the tokenizer does not fit; ``output`` exists.
            Nothing is written then.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype}")
    tokenizer, end_of_document = tokenizer_of(info)
    config = to_config(info, dtype, end_of_document)
    tensors = ModelTensors(TorchDistCheckpoint(info.folder), sizes_of(info))
    shapes = {n: s for e in tensors for n, s in zip(e.hf_names, e.hf_shapes, strict=True)}
    with atomic_folder(output) as folder:
        shards = write_shards(folder, hf_tensors(tensors), shapes, DTYPES[dtype])
        write_json(folder / "config.json", config)
        write_json(folder / "generation_config.json", _generation_config(end_of_document))
        copy_tokenizer(tokenizer, folder)
        if is_variant(info):
            (folder / VARIANT_CODE.name).write_bytes(VARIANT_CODE.read_bytes())
        (folder / "README.md").write_text(model_card(info, dtype), encoding="utf-8")
        return write_manifest(folder, KIND, _manifest(folder, info, dtype, shards))


def hf_tensors(tensors: ModelTensors) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint one by one, under their names in transformers."""
    for entry in tensors:
        yield from zip(entry.hf_names, entry.split(tensors.read(entry)), strict=True)


def _generation_config(end_of_document: int | None) -> dict[str, Any]:
    # Batches are padded with the end of a document too; the attention mask hides it.
    return {"do_sample": False, "eos_token_id": end_of_document, "pad_token_id": end_of_document}


def _manifest(
    folder: Path, info: CheckpointInfo, dtype: str, shards: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    names = sorted(path.name for path in folder.iterdir())
    return {
        "iteration": info.iteration,
        "model": canonical_model(info.model),
        "vocab_size": info.vocab_size,
        "dtype": dtype,
        **info.history,
        "files": {name: shards.get(name) or _file_entry(folder / name) for name in names},
    }


def _file_entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256_of(path)}
