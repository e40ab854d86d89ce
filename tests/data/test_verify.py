"""Whatever is altered in a converted phase is caught."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from kaiyuan.data.convert import convert
from kaiyuan.data.phase import ConvertedPhase, manifest_files
from kaiyuan.data.verify import verify, verify_against
from kaiyuan.errors import UserError
from kaiyuan.files import sha256_of, write_manifest
from tests.data.conftest import write_parquet


@pytest.fixture
def phase(ranked, small, tmp_path):
    convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1, single=True)
    return ConvertedPhase.open(tmp_path / "out")


def test_good_phase_passes(phase, ranked, small):
    report = verify(phase.folder)
    assert report["documents"] == phase.num_documents
    assert report["files"] == 3 * 4 + 1 + 2
    compared = verify_against(phase.folder, [ranked], small.folder)
    assert compared == {"documents": phase.num_documents, "shards": 3}


def test_every_altered_cut_or_missing_file_is_caught(phase):
    rng = random.Random(0)
    names = [*manifest_files(phase.manifest), "manifest.json"]
    for name in names:
        path = phase.folder / name
        good = path.read_bytes()
        for _ in range(4):
            bit = rng.randrange(8 * len(good))
            raw = bytearray(good)
            raw[bit // 8] ^= 1 << bit % 8
            path.write_bytes(raw)
            with pytest.raises(UserError):
                verify(phase.folder)
        # The manifest's last byte is a line end, without which it still says the same.
        for size in (0, 1, len(good) // 2, len(good) - 1 - (name == "manifest.json")):
            path.write_bytes(good[:size])
            with pytest.raises(UserError):
                verify(phase.folder)
        path.unlink()
        with pytest.raises(UserError):
            verify(phase.folder)
        path.write_bytes(good)
    verify(phase.folder)


def reseal(phase, change=lambda manifest: None):
    """Write a manifest that fits the altered files, so that only the inner checks can object."""
    manifest = json.loads((phase.folder / "manifest.json").read_text())
    for name, entry in manifest_files(manifest).items():
        path = phase.folder / name
        entry.update(size=path.stat().st_size, sha256=sha256_of(path))
    change(manifest)
    body = {k: v for k, v in manifest.items() if k not in ("kind", "seal")}
    write_manifest(phase.folder, "phase", body)


def swap_order(phase):
    order = np.load(phase.folder / "order.npy")
    order[[3, 4]] = order[[4, 3]]
    np.save(phase.folder / "order.npy", order)


def repeat_in_order(phase):
    order = np.load(phase.folder / "order.npy")
    order[3] = order[4]
    np.save(phase.folder / "order.npy", order)


def set_id(place, value):
    def change(phase):
        ids = np.fromfile(phase.folder / "shards/00001.bin", np.uint16)
        ids[place] = value
        ids.tofile(phase.folder / "shards/00001.bin")

    return change


def other_row(phase):
    rows = np.load(phase.folder / "shards/00001.rows.npy")
    rows[-1] += 1
    np.save(phase.folder / "shards/00001.rows.npy", rows)


def swap_single(phase):
    for suffix in ("bin", "idx"):
        shutil.copy(phase.folder / f"shards/00000.{suffix}", phase.folder / f"single.{suffix}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap_order, "follow the ranks"),
        (repeat_in_order, "leaves out"),
        (set_id(-1, 5), "does not end with"),
        (set_id(0, 400), "outside the vocabulary"),
        (other_row, "hash"),
        (swap_single, "does not have the documents"),
    ],
)
def test_wrong_content_with_right_hashes_is_caught(phase, damage, message):
    damage(phase)
    reseal(phase)
    with pytest.raises(UserError, match=message):
        verify(phase.folder)


def test_wrong_counts_are_caught(phase):
    reseal(phase, lambda manifest: manifest["counts"].update(null=0))
    with pytest.raises(UserError, match="rows"):
        verify(phase.folder)


def test_altered_parquet_is_caught(phase, ranked, small, tmp_path):
    import pyarrow.parquet as pq

    table = pq.read_table(ranked / "part-00001.parquet").to_pydict()
    row = next(row for row, text in enumerate(table["text"]) if text and len(text) > 10)
    table["text"][row] = "x" + table["text"][row][1:]
    path = write_parquet(tmp_path / "other/part-00001.parquet", 70, **table)
    # The size may differ by a few bytes; the manifest is made to fit it.
    size = path.stat().st_size
    reseal(phase, lambda manifest: manifest["inputs"][1].update(size=size))
    with pytest.raises(UserError, match=rf"is not row {row} of part-00001"):
        verify_against(phase.folder, [tmp_path / "other"], small.folder)


def test_other_files_and_tokenizers_are_refused(phase, small, qwen, tmp_path):
    write_parquet(tmp_path / "other/x.parquet", text=["a"], rank=[1])
    with pytest.raises(UserError, match="none of the files"):
        verify_against(phase.folder, [tmp_path / "other"], small.folder)
    write_parquet(tmp_path / "other/part-00000.parquet", text=["a"], rank=[1])
    with pytest.raises(UserError, match="another size"):
        verify_against(phase.folder, [tmp_path / "other"], small.folder)
    with pytest.raises(UserError, match="another tokenizer"):
        verify_against(phase.folder, [tmp_path / "other"], qwen)


def test_phase_can_go_to_another_process_and_its_hash_is_of_the_content(phase, ranked, small):
    import pickle

    copy = pickle.loads(pickle.dumps(phase))
    assert np.array_equal(copy.tokens(7), phase.tokens(7))
    other = convert([ranked], phase.folder.parent / "desc", small.folder, order="rank-desc")
    assert other["shards"] == phase.manifest["shards"]
    assert ConvertedPhase.open(phase.folder.parent / "desc").content_hash != phase.content_hash


def test_documents_are_views_of_the_file(phase):
    assert not phase.tokens(0).flags.owndata
    assert not phase.tokens(0).flags.writeable
    assert not phase.order().flags.writeable
    with pytest.raises(IndexError):
        phase.tokens(phase.num_documents)


def test_more_shards_than_file_descriptors(small, tmp_path, monkeypatch):
    import resource

    monkeypatch.setattr("kaiyuan.data.units._SMALLEST", 1)
    monkeypatch.setattr("kaiyuan.data.phase._OPEN_SHARDS", 20)
    write_parquet(tmp_path / "in.parquet", 1, text=[f"document {i}" for i in range(60)])
    convert([tmp_path / "in.parquet"], tmp_path / "out", small.folder, workers=1)
    phase = ConvertedPhase.open(tmp_path / "out")
    assert len(phase.shards) == 60
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(list(Path("/proc/self/fd").iterdir()))
    # 20 shards of two files, and a few for what else is opened meanwhile.
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 50, limits[1]))
    try:
        lengths = [len(phase.tokens(i)) for i in range(60)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert lengths == phase.document_lengths().tolist()
