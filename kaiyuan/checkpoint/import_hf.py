"""Import a folder of Hugging Face as a checkpoint of Megatron."""

from pathlib import Path
from typing import Any

from torch import Tensor

from kaiyuan.checkpoint.describe import HISTORY, CheckpointInfo
from kaiyuan.checkpoint.export import KIND
from kaiyuan.checkpoint.hf_config import from_config, read_config, sizes_of
from kaiyuan.checkpoint.load import listed, refuse_non_finite
from kaiyuan.checkpoint.names import Entry, Sizes, entries
from kaiyuan.checkpoint.safetensors_io import Shards
from kaiyuan.checkpoint.save import write_checkpoint
from kaiyuan.errors import UserError
from kaiyuan.files import MANIFEST, read_manifest


def import_hf(folder: Path, output: Path) -> dict[str, Any]:
    """Write the weights of a Qwen3ForCausalLM as a checkpoint, in the precision that they have.

    Args:
        folder: with config.json and safetensors; a tokenizer in it is copied along, and so is
            what the manifest of an export of kaiyuan says of the training.
        output: the folder to make.

    Returns:
        The manifest of the checkpoint.

    Raises:
        UserError: the model is of another kind; tensors are missing, left over, of other shapes or
            not finite; ``output`` exists. Nothing is written then.
    """
    model, vocab_size = from_config(read_config(folder))
    known = read_manifest(folder, KIND) if (folder / MANIFEST).is_file() else {}
    info = CheckpointInfo(
        folder=folder,
        iteration=known.get("iteration", 0),
        model=model,
        vocab_size=vocab_size,
        tokenizer=folder if (folder / "tokenizer.json").is_file() else None,
        history={key: known[key] for key in HISTORY if key in known},
    )
    shards = Shards(folder)
    _check(shards, sizes_of(info))

    def read(entry: Entry) -> Tensor:
        parts = tuple(shards.read(name) for name in entry.hf_names)
        for name, part in zip(entry.hf_names, parts, strict=True):
            refuse_non_finite(name, part)
        return entry.join(parts)

    return write_checkpoint(output, info, read)


def _check(shards: Shards, sizes: Sizes) -> None:
    wanted = {n: s for e in entries(sizes) for n, s in zip(e.hf_names, e.hf_shapes, strict=True)}
    folder = shards.folder
    if missing := [name for name in wanted if name not in shards.files]:
        raise UserError(f"{folder} lacks {len(missing)} tensors of the model: {listed(missing)}")
    if surplus := [name for name in shards.files if name not in wanted]:
        raise UserError(
            f"{folder} has {len(surplus)} tensors that the model does not have: {listed(surplus)}"
        )
    wrong = [
        f"{name} is {list(found)} where {list(shape)} is due"
        for name, shape in wanted.items()
        if (found := shards.shape(name)) != shape
    ]
    if wrong:
        raise UserError(f"{folder} does not fit its config.json: {listed(wrong)}")
