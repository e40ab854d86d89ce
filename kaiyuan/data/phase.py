"""A converted phase as training reads it: documents, their order and where each came from."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kaiyuan.data.indexed import LENGTHS_OFFSET, IndexedReader
from kaiyuan.data.order import RECORD
from kaiyuan.errors import UserError
from kaiyuan.files import read_manifest, sha256_of_json

KIND = "phase"
ORDER_FILE = "order.npy"
# Each open shard holds two file descriptors; the usual limit is 1,024 a process.
_OPEN_SHARDS = 256


class Shards:
    """The documents of file pairs in a row, numbered through from 0.

    Args:
        prefixes: paths without suffix.
        num_documents: of each.
    """

    def __init__(self, prefixes: Sequence[Path], num_documents: Sequence[int]) -> None:
        self.prefixes = list(prefixes)
        self.bounds = np.concatenate(([0], np.cumsum(num_documents, dtype=np.int64)))
        self.reader = functools.lru_cache(_OPEN_SHARDS)(self._open)
        self.column = functools.lru_cache(_OPEN_SHARDS)(self._load_column)

    def _open(self, shard: int) -> IndexedReader:
        return IndexedReader(self.prefixes[shard])

    def _load_column(self, shard: int, name: str) -> NDArray[Any]:
        prefix = self.prefixes[shard]
        return _load_npy(prefix.with_name(f"{prefix.name}.{name}.npy"))

    def locate(self, document: int) -> tuple[int, int]:
        """Return the shard of a document and its place there.

        Raises:
            IndexError: there is no such document.
        """
        if not 0 <= document < self.bounds[-1]:
            raise IndexError(f"document {document} of {self.bounds[-1]}")
        shard = int(np.searchsorted(self.bounds, document, side="right")) - 1
        return shard, int(document - self.bounds[shard])

    def lengths(self) -> NDArray[np.int32]:
        """Return the tokens of every document, int32 [documents]."""
        out = np.empty(int(self.bounds[-1]), np.int32)
        for shard, prefix in enumerate(self.prefixes):
            begin, end = self.bounds[shard], self.bounds[shard + 1]
            path = prefix.with_name(prefix.name + ".idx")
            out[begin:end] = np.fromfile(path, "<i4", end - begin, offset=LENGTHS_OFFSET)
        return out

    def records(self, inputs: Sequence[int]) -> NDArray[Any]:
        """Return what the order's hash is made of (see `RECORD`).

        Args:
            inputs: number of the input file of each shard.
        """
        out = np.empty(int(self.bounds[-1]), RECORD)
        out["tokens"] = self.lengths()
        for shard, number in enumerate(inputs):
            part = out[self.bounds[shard] : self.bounds[shard + 1]]
            part["file"] = number
            part["row"] = self._load_column(shard, "rows")
        return out


class ConvertedPhase:
    """A folder that `kaiyuan convert` finished.

    Documents are numbered in the order of input files and rows; `order` gives the sequence in
    which training takes them.

    Attributes:
        folder: the folder.
        manifest: the sealed manifest.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Use `open`."""
        self.folder = folder
        self.manifest = manifest
        entries = manifest["shards"]
        prefixes = [folder / entry["prefix"] for entry in entries]
        self._shards = Shards(prefixes, [entry["documents"] for entry in entries])

    @classmethod
    def open(cls, folder: Path | str) -> "ConvertedPhase":
        """Read the manifest and check that every file is there with its size.

        Raises:
            UserError: the folder is unfinished, or a file is missing or of another size.
        """
        folder = Path(folder)
        manifest = read_manifest(folder, KIND)
        for name, entry in manifest_files(manifest).items():
            try:
                size = (folder / name).stat().st_size
            except OSError:
                raise UserError(f"{folder / name} is missing: convert the phase again") from None
            if size != entry["size"]:
                raise UserError(
                    f"{folder / name} has {size} bytes where the manifest says {entry['size']}: "
                    "copy or convert the phase again"
                )
        return cls(folder, manifest)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let worker processes of a data loader open the folder for themselves."""
        return ConvertedPhase, (self.folder, self.manifest)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return int(self.manifest["counts"]["documents"])

    @property
    def num_tokens(self) -> int:
        """Number of tokens, one end-of-document token a document included."""
        return int(self.manifest["counts"]["tokens"])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the ids on the disk."""
        return np.dtype(self.manifest["dtype"])

    @property
    def eod(self) -> int:
        """Id that ends every document."""
        return int(self.manifest["eod"]["id"])

    @property
    def vocab_size(self) -> int:
        """Highest id of the tokenizer + 1."""
        return int(self.manifest["tokenizer"]["vocab_size"])

    @property
    def content_hash(self) -> str:
        """Hash of every byte that training reads and of the order; a key for caches."""
        files = {k: v["sha256"] for k, v in manifest_files(self.manifest).items()}
        return sha256_of_json([files, self.manifest["order"]["hash"]])

    @property
    def shards(self) -> list[Path]:
        """Prefixes of the file pairs, in the order of documents."""
        return self._shards.prefixes

    def document_lengths(self) -> NDArray[np.int32]:
        """Return the tokens of every document, int32 [documents]."""
        return self._shards.lengths()

    def order(self) -> NDArray[Any] | None:
        """Return the document numbers in training order.

        Read-only memory map, int32 (int64 from 2^31 documents on), shape [documents]; None where
        training takes the documents in their own order.
        """
        if self.manifest["order"]["file"] is None:
            return None
        return _load_npy(self.folder / ORDER_FILE)

    def tokens(self, document: int) -> NDArray[Any]:
        """Return the ids of a document, the end-of-document token included, without copying."""
        shard, place = self._shards.locate(document)
        return self._shards.reader(shard)[place]

    def source(self, document: int) -> tuple[str, int, int | float | None]:
        """Return the input file, the row in it and the rank (None if not ordered by rank)."""
        shard, place = self._shards.locate(document)
        entry = self.manifest["shards"][shard]
        name = self.manifest["inputs"][entry["input"]]["name"]
        rank = self.column(shard, "ranks").item(place) if "ranks.npy" in entry["files"] else None
        return name, self.column(shard, "rows").item(place), rank

    def column(self, shard: int, name: str) -> NDArray[Any]:
        """Return "rows" or "ranks" of the documents of a shard."""
        return self._shards.column(shard, name)

    def records(self) -> NDArray[Any]:
        """Return what the order's hash is made of, type `kaiyuan.data.order.RECORD`."""
        return self._shards.records([entry["input"] for entry in self.manifest["shards"]])


def manifest_files(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return ``{"size", "sha256"}`` of every file of a phase by its path in the folder."""
    found = {
        f"{shard['prefix']}.{suffix}": entry
        for shard in manifest["shards"]
        for suffix, entry in shard["files"].items()
    }
    if manifest["order"]["file"] is not None:
        found[ORDER_FILE] = manifest["order"]["file"]
    single = manifest["single"] or {"files": {}}
    return found | {f"{single['prefix']}.{k}": v for k, v in single["files"].items()}


def _load_npy(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    return array
