"""The file pairs are Megatron's, byte for byte; damaged ones are refused."""

import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from kaiyuan.data.indexed import IndexedReader, IndexedWriter, id_dtype, write_indexed
from kaiyuan.errors import UserError
from kaiyuan.files import HashedStream, sha256_of

DOCUMENTS = [[5], [1, 2, 3], list(range(400)), [399], [7] * 65]


def write(prefix, documents, dtype="<i4", vocab_size=400, at_a_time=2):
    entries = {}
    with write_indexed(prefix, np.dtype(dtype), vocab_size, entries) as writer:
        for start in range(0, len(documents), at_a_time):
            part = documents[start : start + at_a_time]
            ids = np.array([i for document in part for i in document], np.uint32)
            writer.add(ids, np.array([len(document) for document in part]))
    return entries


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("documents", [DOCUMENTS, DOCUMENTS[:1], DOCUMENTS * 50])
def test_bytes_are_those_of_megatrons_builder(tmp_path, dtype, documents):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    entries = write(tmp_path / "ours", documents, np.dtype(dtype))
    for suffix in ("bin", "idx"):
        theirs = (tmp_path / f"theirs.{suffix}").read_bytes()
        assert (tmp_path / f"ours.{suffix}").read_bytes() == theirs
        assert entries[suffix]["size"] == len(theirs)
        assert entries[suffix]["sha256"] == sha256_of(tmp_path / f"theirs.{suffix}")


def test_megatron_and_our_reader_read_the_documents_back(tmp_path):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    write(tmp_path / "pair", DOCUMENTS)
    theirs = indexed_dataset.IndexedDataset(str(tmp_path / "pair"))
    ours = IndexedReader(tmp_path / "pair")
    ours.check()
    assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
    assert [ours[i].tolist() for i in range(len(ours))] == DOCUMENTS
    assert theirs.document_indices.tolist() == ours.documents.tolist() == [0, 1, 2, 3, 4, 5]


def test_reader_opens_what_megatron_writes_with_several_sequences_a_document(tmp_path):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "pair.bin"), np.int32)
    builder.add_document(torch.arange(7), [3, 4])
    builder.add_document(torch.arange(2), [2])
    builder.finalize(str(tmp_path / "pair.idx"))
    reader = IndexedReader(tmp_path / "pair")
    reader.check()
    assert reader.documents.tolist() == [0, 2, 3]
    assert reader[1].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("vocab_size", [65499, 65500, 151669])
def test_type_follows_megatrons_rule(vocab_size):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    assert id_dtype(vocab_size) == indexed_dataset.DType.optimal_dtype(vocab_size)


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "wrong"),
    [("<i4", 400, 400), ("<u2", 151669, 65536), ("<u2", 151669, 151643), ("<i4", 400, -1)],
)
def test_id_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path, dtype, vocab_size, wrong):
    with (
        pytest.raises(ValueError, match="do not fit"),
        write_indexed(tmp_path / "pair", np.dtype(dtype), vocab_size, {}) as writer,
    ):
        writer.add(np.array([1, wrong]), np.array([2]))
    assert list(tmp_path.iterdir()) == []


def test_nothing_added_is_refused_and_leaves_nothing(tmp_path):
    with (
        pytest.raises(ValueError, match="no documents"),
        write_indexed(tmp_path / "pair", np.dtype("<i4"), 400, {}),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_lengths_must_add_up(tmp_path):
    with (
        pytest.raises(ValueError, match="add up"),
        write_indexed(tmp_path / "pair", np.dtype("<i4"), 400, {}) as writer,
    ):
        writer.add(np.array([1, 2]), np.array([1]))


def patch(path, offset, layout, value):
    raw = bytearray(path.read_bytes())
    struct.pack_into(layout, raw, offset, value)
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("suffix", "damage", "message"),
    [
        ("idx", lambda p: p.write_bytes(b"XX" + p.read_bytes()[2:]), "not a Megatron index"),
        ("idx", lambda p: p.write_bytes(p.read_bytes()[:20]), "cut short"),
        ("idx", lambda p: p.write_bytes(p.read_bytes()[:-8]), "does not fit"),
        ("idx", lambda p: p.write_bytes(p.read_bytes() + b"\0"), "does not fit"),
        ("idx", lambda p: p.write_bytes(b""), "cannot be read"),
        ("idx", lambda p: p.unlink(), "missing"),
        ("idx", lambda p: patch(p, 9, "<Q", 2), "version 2"),
        ("idx", lambda p: patch(p, 17, "<B", 77), "type 77"),
        ("idx", lambda p: patch(p, 18, "<Q", 2**63), "does not fit"),
        ("idx", lambda p: patch(p, 34, "<i", 2), "do not follow"),
        ("idx", lambda p: patch(p, 34 + 20 + 8, "<q", 8), "do not follow"),
        ("idx", lambda p: patch(p, 34 + 60 + 8, "<q", 5), "do not rise"),
        ("bin", lambda p: p.write_bytes(p.read_bytes()[:-4]), "where its index says"),
        ("bin", lambda p: p.write_bytes(p.read_bytes() + b"\0\0\0\0"), "where its index says"),
        ("bin", lambda p: p.write_bytes(b""), "cannot be read"),
        ("bin", lambda p: p.unlink(), "missing"),
    ],
)
def test_damaged_pair_is_named(tmp_path, suffix, damage, message):
    write(tmp_path / "pair", DOCUMENTS)
    damage(tmp_path / f"pair.{suffix}")
    with pytest.raises(UserError, match=message):
        IndexedReader(tmp_path / "pair").check()


def test_random_bit_flips_in_the_index_never_go_unseen_or_crash(tmp_path):
    write(tmp_path / "pair", DOCUMENTS)
    path = tmp_path / "pair.idx"
    good = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        bit = rng.randrange(8 * len(good))
        raw = bytearray(good)
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        # A bound between documents may move to another place that is in order; nothing else may.
        try:
            reader = IndexedReader(tmp_path / "pair")
            reader.check()
        except UserError:
            continue
        assert bit // 8 >= 34 + 12 * len(DOCUMENTS)


@pytest.mark.slow
def test_offsets_beyond_two_to_the_31_ids(tmp_path):
    """An int32 anywhere in the sums would wrap here."""
    ids = np.zeros(100_000_000, np.uint16)
    lengths = np.full(1000, 100_000)
    with Path(os.devnull).open("wb") as null, (tmp_path / "big.idx").open("wb") as index:
        writer = IndexedWriter(HashedStream(null), np.dtype("<u2"), 400)
        for _ in range(23):
            writer.add(ids, lengths)
        writer.write_index(HashedStream(index))
    raw = (tmp_path / "big.idx").read_bytes()
    pointers = np.frombuffer(raw, "<i8", 23_000, 34 + 4 * 23_000)
    assert pointers[-1] == 2 * 100_000 * 22_999 > 2**32
    assert np.all(np.diff(pointers) == 200_000)
