"""From parquet row to token, in order; every mistake of a user is one sentence."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from kaiyuan.data import convert as convert_module
from kaiyuan.data import executors
from kaiyuan.data.convert import convert, plan_conversion
from kaiyuan.data.indexed import IndexedReader
from kaiyuan.data.inputs import find_inputs
from kaiyuan.data.inspect import inspect
from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.data.sources import find_sources
from kaiyuan.data.tokenizer import ENDOFTEXT
from kaiyuan.errors import UserError
from tests.data.conftest import sentences, write_parquet


def expected_documents(folder: Path, tokenizer, order: str):
    """(file, row, rank, ids) in training order, by plain Python and Hugging Face's tokenizers."""
    reference = Tokenizer.from_file(str(tokenizer.folder / "tokenizer.json"))
    rows = []
    for path in sorted(folder.glob("*.parquet")):
        for number, row in enumerate(pq.read_table(path).to_pylist()):
            if row["text"]:
                ids = reference.encode(row["text"], add_special_tokens=False).ids
                ids = [*ids, reference.token_to_id(ENDOFTEXT)]
                rank = None if order == "file" else row["rank"]
                rows.append((path.name, number, rank, ids))
    if order == "rank":
        rows.sort(key=lambda row: row[2])
    if order == "rank-desc":
        rows.sort(key=lambda row: -row[2])
    return rows


def found_documents(phase: ConvertedPhase):
    order = phase.order()
    ids = range(phase.num_documents) if order is None else order.tolist()
    return [(*phase.source(i), phase.tokens(i).tolist()) for i in ids]


@pytest.mark.parametrize("order", ["rank", "rank-desc", "file"])
def test_documents_are_the_rows_in_order(ranked, small, tmp_path, order):
    manifest = convert([ranked], tmp_path / "out", small.folder, order=order, workers=1)
    phase = ConvertedPhase.open(tmp_path / "out")
    expected = expected_documents(ranked, small, order)
    assert found_documents(phase) == expected
    assert phase.document_lengths().tolist() == [
        len(row[3]) for row in expected_documents(ranked, small, "file")
    ]
    counts = manifest["counts"]
    texts = [row["text"] for p in ranked.glob("*") for row in pq.read_table(p).to_pylist()]
    assert counts["rows"] == 1500 == len(texts)
    assert counts["null"] == sum(text is None for text in texts) == 37
    assert counts["empty"] == sum(text == "" for text in texts) > 0
    assert counts["documents"] == len(expected) == phase.num_documents
    assert counts["tokens"] == sum(len(row[3]) for row in expected) == phase.num_tokens
    assert counts["text_bytes"] == sum(len(text.encode()) for text in texts if text)
    inside = sum(row[3].count(phase.eod) - 1 for row in expected)
    assert counts["eod_in_text"] == inside > 0
    assert phase.dtype == np.uint16
    assert phase.vocab_size == 400


def test_megatron_reads_each_shard_and_the_single_pair(ranked, small, tmp_path):
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1, single=True)
    phase = ConvertedPhase.open(tmp_path / "out")
    in_files = [row[3] for row in expected_documents(ranked, small, "file")]
    found = []
    for prefix in phase.shards:
        theirs = indexed_dataset.IndexedDataset(str(prefix))
        found += [theirs[i].tolist() for i in range(len(theirs))]
    assert found == in_files
    single = indexed_dataset.IndexedDataset(str(tmp_path / "out/single"))
    in_order = [row[3] for row in expected_documents(ranked, small, "rank")]
    assert [single[i].tolist() for i in range(len(single))] == in_order


def test_qwen_ids_are_int32_and_end_with_the_token_that_was_asked_for(qwen, tmp_path):
    write_parquet(tmp_path / "in.parquet", text=["hello 数据", "x"])
    for token, number in ((ENDOFTEXT, 151643), ("<|im_end|>", 151645)):
        manifest = convert([tmp_path / "in.parquet"], tmp_path / token, qwen, eod=token)
        phase = ConvertedPhase.open(tmp_path / token)
        assert phase.tokens(0)[-1] == phase.tokens(1)[-1] == phase.eod == number
        assert phase.dtype == np.int32
        assert manifest["eod"] == {"id": number, "token": token}


def summary_of(manifest):
    shards = [{k: v["sha256"] for k, v in shard["files"].items()} for shard in manifest["shards"]]
    return [manifest["order"], manifest["counts"], shards]


def test_workers_do_not_change_a_byte(ranked, small, tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "_WORTH_A_PROCESS", 1)
    manifests = [
        convert([ranked], tmp_path / str(n), small.folder, order="rank", workers=n) for n in (1, 2)
    ]
    assert summary_of(manifests[0]) == summary_of(manifests[1])
    assert manifests[0] == manifests[1]


def test_order_hash_does_not_depend_on_the_cut_into_shards(ranked, small, tmp_path, monkeypatch):
    whole = convert([ranked], tmp_path / "a", small.folder, order="rank", workers=1)
    monkeypatch.setattr("kaiyuan.data.units._SMALLEST", 1)
    cut = convert([ranked], tmp_path / "b", small.folder, order="rank", workers=1)
    assert len(cut["shards"]) > len(whole["shards"]) == 3
    assert cut["order"] == whole["order"]
    parts = [ConvertedPhase.open(tmp_path / name) for name in "ab"]
    assert found_documents(parts[0]) == found_documents(parts[1])


def test_encoders_give_the_same_bytes(ranked, small, tmp_path):
    fast, hf = (
        convert([ranked], tmp_path / e, small.folder, order="file", workers=1, encoder=e)
        for e in ("fast", "hf")
    )
    assert (fast["encoder"], hf["encoder"]) == ("fast", "hf")
    assert summary_of(fast) == summary_of(hf)


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_types_of_text(small, tmp_path, kind):
    texts = [*sentences(50), None, "", "last"]
    column = pa.array(texts, pa.string()).cast(kind)
    write_parquet(tmp_path / "in.parquet", 20, text=column)
    manifest = convert([tmp_path / "in.parquet"], tmp_path / "out", small.folder)
    rows = expected_documents(tmp_path, small, "file")
    assert found_documents(ConvertedPhase.open(tmp_path / "out")) == rows
    assert manifest["counts"]["null"] == manifest["counts"]["empty"] == 1


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        (pa.int32(), [3, -1, 2, 0]),
        (pa.int64(), [2**60 + 1, 2**60, 2**60 + 3, -(2**62)]),
        (pa.uint32(), [3, 1, 2**32 - 1, 0]),
        (pa.float64(), [0.5, -0.25, 1e300, 0.1]),
        (pa.float32(), [0.5, -0.25, 3.0, 0.125]),
    ],
    ids=str,
)
def test_types_of_rank(small, tmp_path, kind, ranks):
    texts = ["a", "b", "c", "d"]
    write_parquet(tmp_path / "in.parquet", text=texts, rank=pa.array(ranks, kind))
    convert([tmp_path / "in.parquet"], tmp_path / "out", small.folder, order="rank")
    rows = expected_documents(tmp_path, small, "rank")
    assert found_documents(ConvertedPhase.open(tmp_path / "out")) == rows


def test_equal_ranks_are_counted_and_follow_file_and_row(small, tmp_path):
    ranks = [5, 1, 1, 5, 1, 0]
    write_parquet(tmp_path / "in/a.parquet", text=list("abc"), rank=ranks[:3])
    write_parquet(tmp_path / "in/b.parquet", text=list("def"), rank=ranks[3:])
    for order, letters in (("rank", "fbcead"), ("rank-desc", "adbcef")):
        manifest = convert([tmp_path / "in"], tmp_path / order, small.folder, order=order)
        phase = ConvertedPhase.open(tmp_path / order)
        found = [small_text(small, phase.tokens(i)) for i in phase.order()]
        assert "".join(found) == letters
        assert manifest["order"]["duplicates"] == 3  # two more of rank 1, one more of rank 5


def small_text(small, ids):
    decoder = Tokenizer.from_file(str(small.folder / "tokenizer.json"))
    return decoder.decode(ids[:-1].tolist(), skip_special_tokens=False)


def test_rows_without_text_may_be_anywhere_and_need_no_rank(small, tmp_path):
    texts = [None, "", "a", None, "b", ""]
    ranks = [None, float("nan"), 2.0, None, 1.0, None]
    write_parquet(tmp_path / "in/1.parquet", 2, text=texts, rank=ranks)
    write_parquet(tmp_path / "in/2.parquet", 2, text=[None, ""], rank=[1.0, 2.0])
    schema = pa.schema([("rank", pa.float64()), ("more", pa.list_(pa.int8())), ("text", "string")])
    pq.write_table(schema.empty_table(), tmp_path / "in/3.parquet")
    more = [[1], [2]]
    write_parquet(tmp_path / "in/10.parquet", rank=[0.0, 3.0], more=more, text=["c", "d"])
    manifest = convert([tmp_path / "in"], tmp_path / "out", small.folder, order="rank", workers=1)
    phase = ConvertedPhase.open(tmp_path / "out")
    assert [phase.source(i)[:2] for i in phase.order()] == [
        ("10.parquet", 0),
        ("1.parquet", 4),
        ("1.parquet", 2),
        ("10.parquet", 1),
    ]
    assert [entry["name"] for entry in manifest["inputs"]] == [
        "1.parquet", "2.parquet", "3.parquet", "10.parquet",
    ]  # fmt: skip
    assert [entry["counts"]["rows"] for entry in manifest["inputs"]] == [6, 2, 0, 2]


def test_inputs_may_be_files_folders_and_globs(small, tmp_path):
    for name in ("x/1.parquet", "x/deep/2.parquet", "y/3.parquet", "y/4.parquet"):
        write_parquet(tmp_path / name, text=[name])
    write_parquet(tmp_path / "x/_temporary/5.parquet", text=["unfinished"])
    (tmp_path / "x/_SUCCESS").touch()
    inputs = [str(tmp_path / "y/*.parquet"), tmp_path / "x"]
    manifest = convert(inputs, tmp_path / "out", small.folder, workers=1)
    names = [entry["name"] for entry in manifest["inputs"]]
    assert names == ["y/3.parquet", "y/4.parquet", "x/1.parquet", "x/deep/2.parquet"]


def test_one_document_of_twenty_megabytes_among_small_ones(small, tmp_path):
    rng = random.Random(0)
    words = sentences(200)
    long = " ".join(rng.choices(words, k=120_000))[:20_000_000]
    texts = [*words, long, *words]
    write_parquet(tmp_path / "in.parquet", 1000, text=texts)
    convert([tmp_path / "in.parquet"], tmp_path / "out", small.folder)
    phase = ConvertedPhase.open(tmp_path / "out")
    reference = Tokenizer.from_file(str(small.folder / "tokenizer.json"))
    assert phase.num_documents == 401
    assert small_text(small, phase.tokens(200)) == long
    assert phase.tokens(201)[:-1].tolist() == reference.encode(words[0]).ids


def test_dry_run_is_close_and_writes_nothing(ranked, small, tmp_path):
    summary = plan_conversion([ranked], tmp_path / "out", small.folder, order="rank").summary()
    assert not (tmp_path / "out").exists()
    manifest = convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)
    assert summary["rows"] == manifest["counts"]["rows"]
    assert summary["tokens"] == pytest.approx(manifest["counts"]["tokens"], rel=0.15)
    written = sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.suffix != ".json")
    assert summary["disk_bytes"] == pytest.approx(written, rel=0.3)


def test_finished_run_is_left_alone_and_single_can_be_added(ranked, small, tmp_path):
    options = {"order": "rank", "workers": 1}
    first = convert([ranked], tmp_path / "out", small.folder, **options)
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*.*") if p.name != ".lock"}
    assert convert([ranked], tmp_path / "out", small.folder, **options) == first
    assert times == {p: p.stat().st_mtime_ns for p in times}
    added = convert([ranked], tmp_path / "out", small.folder, **options, single=True)
    assert summary_of(added) == summary_of(first)
    reader = IndexedReader(tmp_path / "out/single")
    assert len(reader) == first["counts"]["documents"]
    assert convert([ranked], tmp_path / "out", small.folder, **options) == added


def rows(**columns):
    return lambda folder: write_parquet(folder / "in/a.parquet", **columns)


MISTAKES = {
    "no column of text": (rows(content=["a"]), {}, "no column 'text', only content"),
    "text is a number": (rows(text=[1, 2]), {}, "is int64, where text is needed"),
    "text is bytes": (rows(text=[b"a"]), {}, "is binary, where text is needed"),
    "all empty": (rows(text=["", None]), {}, "no documents"),
    "rank not said": (rows(text=["a"], rank=[1]), {}, "say --order"),
    "no rank": (rows(text=["a"]), {"order": "rank"}, "no column 'rank' to order by"),
    "rank is text": (rows(text=["a"], rank=["1"]), {"order": "rank"}, "a number is needed"),
    "rank null": (rows(text=["a", "b"], rank=[1, None]), {"order": "rank"}, "row 1 has no rank"),
    "rank NaN": (
        rows(text=["a", "b"], rank=[1.0, float("nan")]),
        {"order": "rank-desc"},
        "row 1 has no rank",
    ),
    "rank too big": (
        rows(text=["a"], rank=pa.array([2**64 - 1], pa.uint64())),
        {"order": "rank"},
        "out of range",
    ),
    "unknown token": (rows(text=["a"]), {"eod": "<eos>"}, "'<eos>' is no token"),
    "not parquet": (lambda f: (f / "in/a.parquet").write_bytes(b"PAR1"), {}, "not a whole parquet"),
    "empty file": (lambda f: (f / "in/a.parquet").touch(), {}, "not a whole parquet"),
    "no files": (lambda f: None, {}, "no parquet files"),
    "no folder": (lambda f: (f / "in").rmdir(), {}, "does not exist"),
    "output in use": (
        lambda f: (rows(text=["a"])(f), (f / "out").mkdir(), (f / "out/mine").touch()),
        {},
        "holds other things",
    ),
    "output is a file": (
        lambda f: (rows(text=["a"])(f), (f / "out").touch()),
        {},
        "is not a folder",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_sentence_and_leaves_nothing_finished(small, tmp_path, name):
    prepare, options, message = MISTAKES[name]
    (tmp_path / "in").mkdir()
    prepare(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        convert([tmp_path / "in"], tmp_path / "out", small.folder, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out/manifest.json").exists()


def test_links_to_files_go_by_their_own_names(small, tmp_path):
    """As they lie in a snapshot of Hugging Face's cache, whose blobs are called by their hashes."""
    snapshot = tmp_path / "snapshots/5e/phase1"
    snapshot.mkdir(parents=True)
    for number, blob in enumerate(("f00", "a11", "c22")):
        write_parquet(tmp_path / "blobs" / blob, text=[f"document {number}"], rank=[7])
        (snapshot / f"part-{number:05d}.parquet").symlink_to(f"../../../blobs/{blob}")
    names = [f"part-{number:05d}.parquet" for number in range(3)]
    assert [Path(file.name).name for file in inspect([str(snapshot)]).files] == names
    for order in ("file", "rank"):
        out = tmp_path / order
        for inputs in ([snapshot], [f"{snapshot}/*.parquet"], [snapshot / name for name in names]):
            plan = plan_conversion(inputs, out, small.folder, order=order)
            assert [file.name for file in plan.files] == names
        convert([snapshot], out, small.folder, order=order, workers=1)
        phase = ConvertedPhase.open(out)
        texts = [small_text(small, phase.tokens(document)) for document in range(3)]
        assert texts == ["document 0", "document 1", "document 2"]
        assert [phase.source(document)[0] for document in range(3)] == names


def test_a_link_that_leads_nowhere_is_refused(ranked):
    (ranked / "part-00003.parquet").symlink_to("gone")
    for given in (ranked, f"{ranked}/*.parquet"):
        with pytest.raises(UserError, match=r"part-00003\.parquet is a link to a file that is not"):
            find_inputs([given])


@pytest.mark.parametrize("find", [find_inputs, find_sources])
def test_nothing_below_a_folder_is_left_out_unsaid(ranked, tmp_path, find):
    write_parquet(tmp_path / "nest/x/b.parquet", text=["one"])
    (tmp_path / "empty/deep").mkdir(parents=True)
    (ranked / "notes").symlink_to(tmp_path / "empty")
    (ranked / "_old").symlink_to(tmp_path / "nest")
    assert len(find([str(ranked)])) == 3
    (ranked / "sub").symlink_to(tmp_path / "nest")
    with pytest.raises(UserError, match=r"in/sub is a link to a folder with parquet files"):
        find([str(ranked)])
    assert len(find([str(ranked / "sub")])) == 1
    (ranked / "sub").unlink()
    (ranked / "sub").symlink_to(ranked)  # in a circle
    with pytest.raises(UserError, match=r"in/sub is a link to a folder with parquet files"):
        find([str(ranked)])


@pytest.mark.parametrize("find", [find_inputs, find_sources])
def test_a_name_that_is_not_utf8_is_refused(ranked, tmp_path, find):
    shutil.copy(ranked / "part-00000.parquet", os.fsencode(ranked) + b"/b\xff\xe9.parquet")
    with pytest.raises(UserError, match=r"in/b\\udcff\\udce9.parquet' is not UTF-8"):
        find([str(ranked)])


def test_a_file_and_a_link_to_it_are_the_same_file(ranked, small, tmp_path):
    (tmp_path / "link.parquet").symlink_to(ranked / "part-00000.parquet")
    with pytest.raises(UserError, match="twice"):
        find_inputs([ranked, tmp_path / "link.parquet"])


def test_a_way_over_two_points_goes_where_the_links_lead(ranked, tmp_path):
    (tmp_path / "elsewhere/deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("elsewhere/deep")
    write_parquet(tmp_path / "elsewhere/1.parquet", text=["x"])
    found = find_inputs([tmp_path / "link/../1.parquet", ranked])
    assert [file.name for file in found] == [
        "elsewhere/1.parquet",
        *(f"in/part-0000{part}.parquet" for part in range(3)),
    ]


def test_file_given_twice_is_refused(ranked, small, tmp_path):
    with pytest.raises(UserError, match="twice"):
        convert([ranked, ranked / "part-00000.parquet"], tmp_path / "out", small.folder)


def test_too_little_disk_is_said_before_the_first_byte(ranked, small, tmp_path, monkeypatch):
    usage = convert_module.shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"the disk has 100\.0 kB free"):
        convert([ranked], tmp_path / "out", small.folder, order="rank")
    assert not (tmp_path / "out").exists()


def test_two_runs_in_one_folder_are_refused(ranked, small, tmp_path):
    convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)
    with (
        convert_module._locked(tmp_path / "out"),
        pytest.raises(UserError, match="another conversion"),
    ):
        convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)


def test_manifest_says_what_it_was_made_of(ranked, small, tmp_path):
    from kaiyuan.files import sha256_of

    convert([ranked], tmp_path / "out", small.folder, order="rank", workers=1)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["tokenizer"] == {"hash": small.hash, "vocab_size": 400}
    for entry in manifest["inputs"]:
        path = ranked / entry["name"]
        assert entry["size"] == path.stat().st_size
        assert entry["sha256"] == sha256_of(path)
