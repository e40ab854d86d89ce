"""Checks of a converted phase: against its manifest, within itself, and against the parquet."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kaiyuan.data.indexed import IndexedReader
from kaiyuan.data.inputs import find_inputs, read_rows
from kaiyuan.data.order import order_hash
from kaiyuan.data.phase import ConvertedPhase, manifest_files
from kaiyuan.data.tokenizer import load_encoder, load_tokenizer
from kaiyuan.data.units import append_eod
from kaiyuan.errors import UserError
from kaiyuan.files import sha256_of

_SLICE = 4_000_000


def verify(folder: Path | str) -> dict[str, int]:
    """Check every byte of a phase that training reads.

    Hashes and sizes of all files of the manifest, every index, every id's range, the
    end-of-document token at the end of every document, the row accounting, and the order: that it
    holds each document once, follows the ranks, breaks ties by file and row, and has the hash of
    the manifest.

    Returns:
        What was checked: ``files``, ``bytes``, ``documents``, ``tokens``.

    Raises:
        UserError: the first thing that is wrong.
    """
    phase = ConvertedPhase.open(folder)
    files = manifest_files(phase.manifest)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda item: _check_hash(phase, *item), files.items()):
            pass
        for _ in pool.map(lambda shard: _check_shard(phase, shard), range(len(phase.shards))):
            pass
    _check_counts(phase.manifest)
    _check_order(phase)
    if phase.manifest["single"] is not None:
        _check_single(phase)
    return {
        "files": len(files),
        "bytes": sum(entry["size"] for entry in files.values()),
        "documents": phase.num_documents,
        "tokens": phase.num_tokens,
    }


def verify_against(
    folder: Path | str, inputs: Sequence[str | Path], tokenizer: Path | str
) -> dict[str, int]:
    """Compare a sample of documents with the parquet files, encoded anew by Hugging Face.

    The sample is the first batch of rows of each shard that has its file among the inputs.

    Returns:
        ``documents`` compared, and the ``shards`` that they are of.

    Raises:
        UserError: a document differs, or the tokenizer or a file is another one.
    """
    phase = ConvertedPhase.open(folder)
    info = load_tokenizer(Path(tokenizer))
    if info.hash != phase.manifest["tokenizer"]["hash"]:
        raise UserError(f"{folder} was made with another tokenizer than {tokenizer}")
    rank = phase.manifest["order"]["column"]
    found = {f.name: f for f in find_inputs(inputs, phase.manifest["text_column"], rank or "rank")}
    encoder = load_encoder(info.folder, info.json_sha256, "hf", phase.manifest["special_text"])
    first = documents = shards = 0
    for entry in phase.manifest["shards"]:
        known = phase.manifest["inputs"][entry["input"]]
        file = found.get(known["name"])
        if file is not None:
            if file.size != known["size"]:
                raise UserError(f"{file.path} has another size than the file that was converted")
            groups = range(*entry["row_groups"])
            batches = read_rows(file, groups, phase.manifest["text_column"], rank)
            batch = next(batch for batch in batches if batch.texts)
            ids, lengths = append_eod(*encoder.encode(batch.texts), phase.eod)
            ends = np.cumsum(lengths)
            for place, end in enumerate(ends):
                expected = ids[end - lengths[place] : end]
                value = None if batch.ranks is None else batch.ranks.item(place)
                source = (file.name, batch.rows.item(place), value)
                _check_document(phase, first + place, expected, source)
            documents, shards = documents + len(ends), shards + 1
        first += entry["documents"]
    if not shards:
        raise UserError(f"none of the files is one that {folder} was converted from")
    return {"documents": documents, "shards": shards}


def _check_document(
    phase: ConvertedPhase, document: int, ids: NDArray[Any], source: tuple[Any, ...]
) -> None:
    if phase.source(document) != source or not np.array_equal(phase.tokens(document), ids):
        raise UserError(f"document {document} is not row {source[1]} of {source[0]}")


def _check_hash(phase: ConvertedPhase, name: str, entry: dict[str, Any]) -> None:
    if sha256_of(phase.folder / name) != entry["sha256"]:
        raise UserError(
            f"{phase.folder / name} was altered: its hash is not that of the manifest; "
            "copy or convert it again"
        )


def _check_shard(phase: ConvertedPhase, shard: int) -> None:
    entry = phase.manifest["shards"][shard]
    reader = IndexedReader(phase.shards[shard])
    reader.check()
    _check_pair(reader, phase, entry["documents"], entry["tokens"])
    rows = phase.column(shard, "rows")
    if len(rows) != len(reader) or np.any(np.diff(rows) <= 0):
        raise UserError(f"{reader.prefix}.rows.npy does not name a later row for each document")


def _check_pair(reader: IndexedReader, phase: ConvertedPhase, documents: int, tokens: int) -> None:
    if (len(reader), len(reader.ids), reader.dtype) != (documents, tokens, phase.dtype):
        raise UserError(f"{reader.prefix} does not have the documents that the manifest says")
    for start in range(0, tokens, _SLICE):
        part = reader.ids[start : start + _SLICE]
        if int(part.min()) < 0 or int(part.max()) >= phase.vocab_size:
            raise UserError(f"{reader.prefix}.bin has ids outside the vocabulary")
    ends = np.cumsum(reader.lengths, dtype=np.int64) - 1
    if np.any(reader.lengths < 1) or np.any(reader.ids[ends] != phase.eod):
        raise UserError(f"{reader.prefix}.bin has a document that does not end with {phase.eod}")


def _check_counts(manifest: dict[str, Any]) -> None:
    counts = manifest["counts"]
    parts = [entry["counts"] for entry in manifest["inputs"]]
    sums = {key: sum(part[key] for part in parts) for key in counts}
    left_out = counts["null"] + counts["empty"]
    if sums != counts or counts["rows"] != counts["documents"] + left_out:
        raise UserError("the manifest's rows are not its documents and the rows left out")
    for key in ("documents", "tokens"):
        if sum(shard[key] for shard in manifest["shards"]) != counts[key]:
            raise UserError(f"the shards do not have the {key} that the manifest says")


def _check_order(phase: ConvertedPhase) -> None:
    ids, entry = phase.order(), phase.manifest["order"]
    if ids is not None:
        seen = np.zeros(phase.num_documents, bool)
        if len(ids) != len(seen) or int(ids.min()) < 0 or int(ids.max()) >= len(seen):
            raise UserError(f"{phase.folder}: the order names documents that do not exist")
        seen[ids] = True
        if not seen.all():
            raise UserError(f"{phase.folder}: the order leaves out document {int(seen.argmin())}")
    if entry["kind"] != "file":
        _check_ranks(phase, ids)
    if order_hash(phase.records(), ids) != entry["hash"]:
        raise UserError(f"{phase.folder}: the order does not have the hash of the manifest")


def _check_ranks(phase: ConvertedPhase, ids: NDArray[Any] | None) -> None:
    ranks = np.concatenate([phase.column(shard, "ranks") for shard in range(len(phase.shards))])
    ids = np.arange(len(ranks)) if ids is None else ids
    in_order = ranks[ids]
    before, after = in_order[:-1], in_order[1:]
    rises = before > after if phase.manifest["order"]["kind"] == "rank-desc" else before < after
    if not np.all(rises | ((before == after) & (ids[:-1] < ids[1:]))):
        raise UserError(f"{phase.folder}: the order does not follow the ranks")


def _check_single(phase: ConvertedPhase) -> None:
    reader = IndexedReader(phase.folder / phase.manifest["single"]["prefix"])
    reader.check()
    _check_pair(reader, phase, phase.num_documents, phase.num_tokens)
    ids, lengths = phase.order(), phase.document_lengths()
    if not np.array_equal(reader.lengths, lengths if ids is None else lengths[ids]):
        raise UserError(f"{reader.prefix} does not hold the documents in training order")
