"""Write a torch_dist checkpoint of a model, tensor by tensor, without a process group.

Megatron loads it like one of its own, at any tensor and pipeline parallel size: the layers are
stacked in the index, and each is one chunk.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from kaiyuan.checkpoint.describe import HISTORY, RELEASE, CheckpointInfo
from kaiyuan.checkpoint.hf_config import sizes_of
from kaiyuan.checkpoint.load import INDEX
from kaiyuan.checkpoint.names import MEGATRON_LAYERS, Entry, Sizes, entries
from kaiyuan.checkpoint.tokenizer import check_tokenizer, copy_tokenizer
from kaiyuan.files import atomic_folder, write_json, write_manifest
from kaiyuan.runfolder import TRACKER

_DATA_FILE = "__0_0.distcp"
TOKENIZER = "tokenizer"

# What Megatron reads beside the tensors. Below version 2, load_checkpoint would shuffle the rows
# of linear_qkv. There are no "args": without them it takes those of the training that loads.
_COMMON_STATE = {"checkpoint_version": 3.0, "iteration": 0}

# Modules that keep scaling factors of FP8. Without FP8 each is None, but Megatron's loader wants
# them to be there: the first four with its own linear layers, the rest with TransformerEngine's.
_EXTRA_STATES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
)


def write_checkpoint(
    output: Path, info: CheckpointInfo, read: Callable[[Entry], Tensor]
) -> dict[str, Any]:
    """Write a checkpoint of model weights, which training takes as its start.

    Megatron calls such a checkpoint a release: it has no optimizer state and no iteration.

    Args:
        output: folder to make. ``pretrained_checkpoint=output`` gives it to a training.
        info: what the checkpoint is of; its folder is not used.
        read: gives each tensor, as Megatron has it, without padding.

    Returns:
        The manifest.
    """
    with atomic_folder(output) as folder:
        body = {
            "iteration": info.iteration,
            "model": info.model,
            "vocab_size": info.vocab_size,
            "tokenizer": TOKENIZER if info.tokenizer else None,
            **{key: info.history[key] for key in HISTORY if key in info.history},
        }
        if info.tokenizer:
            copy_tokenizer(info.tokenizer, folder / TOKENIZER)
            check_tokenizer(folder / TOKENIZER, info.vocab_size)
        write_torch_dist(folder / RELEASE, sizes_of(info), read)
        (folder / TRACKER).write_text(RELEASE)
        return write_manifest(folder, "checkpoint", body)


def write_torch_dist(folder: Path, sizes: Sizes, read: Callable[[Entry], Tensor]) -> None:
    """Write the data file and the index of one checkpoint folder."""
    folder.mkdir()
    writer = _Writer(folder / _DATA_FILE)
    for entry in entries(sizes):
        writer.add_tensor(entry, read(entry))
    for layer in range(sizes.layers):
        for module in _EXTRA_STATES:
            name = f"{MEGATRON_LAYERS}{module}._extra_state/shard_{layer}_{sizes.layers}"
            writer.add_object(name, None)
    writer.add_object("decoder.final_layernorm._extra_state/shard_0_1", None)
    writer.add_object("common_state/shard_0_1", _COMMON_STATE)
    writer.finish(folder / INDEX)
    write_json(
        folder / "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    )


class _Writer:
    """Appends to the data file and keeps the index."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = path.open("wb")
        self._tensors: dict[str, Any] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def add_tensor(self, entry: Entry, tensor: Tensor) -> None:
        """Append a tensor; those of the layers become the rows of one stacked tensor."""
        name, shape, offsets = entry.rule.megatron, tensor.shape, [0] * tensor.dim()
        if entry.layer is not None:
            name = MEGATRON_LAYERS + name
            shape = torch.Size([entry.sizes.layers, *shape])
            offsets = [entry.layer, *offsets]
            tensor = tensor[None]
        if name not in self._tensors:
            properties = TensorProperties(dtype=tensor.dtype)
            self._tensors[name] = TensorStorageMetadata(properties, shape, [])
        chunk = ChunkStorageMetadata(torch.Size(offsets), tensor.shape)
        self._tensors[name].chunks.append(chunk)
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            tensor = tensor.clone()  # or the whole storage, of which it is a part, would be written
        self._append(MetadataIndex(name, offsets), tensor)

    def add_object(self, name: str, value: object) -> None:
        """Append an object, as Megatron does: in a list with one member."""
        self._tensors[name] = BytesStorageMetadata()
        self._append(MetadataIndex(name), [value])

    def _append(self, key: MetadataIndex, value: object) -> None:
        start = self._stream.tell()
        torch.save(value, self._stream)
        length = self._stream.tell() - start
        self._places[key] = _StorageInfo(self._path.name, start, length)

    def finish(self, index: Path) -> None:
        """Close the data file and write the index."""
        self._stream.close()
        metadata = Metadata(self._tensors, storage_data=self._places, version="1.0.0")
        index.write_bytes(pickle.dumps(metadata))
