import json

import pyarrow.parquet as pq
import pytest

from kaiyuan.data.corpus import make_corpus
from kaiyuan.errors import UserError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return folder, make_corpus(folder)


def rows(folder, phase):
    tables = [pq.read_table(path) for path in sorted((folder / phase).glob("*.parquet"))]
    return [row for table in tables for row in table.to_pylist()]


def test_it_is_laid_out_as_the_published_data(corpus):
    folder, manifest = corpus
    names = [phase["name"] for phase in manifest["phases"]]
    assert names == ["phase1", "phase2", "phase3", "phase4", "phase5"]
    for name in names:
        for path in (folder / name).glob("*.parquet"):
            file = pq.ParquetFile(path)
            ranked = name in names[2:]
            assert file.schema_arrow.names == (["text", "rank"] if ranked else ["text"])
            assert file.metadata.row_group(0).column(0).compression == "ZSTD"


def test_size_and_rows_without_text(corpus):
    folder, manifest = corpus
    total = 0
    for phase in manifest["phases"]:
        texts = [row["text"] for row in rows(folder, phase["name"])]
        assert len(texts) == phase["rows"]
        assert texts.count(None) == phase["null"] > 0
        assert texts.count("") == phase["empty"] > 0
        total += sum(len(text.encode()) for text in texts if text)
    assert total >= 10_000_000


def test_ranks_are_whole_but_not_in_order(corpus):
    folder, _ = corpus
    for phase in ("phase3", "phase4", "phase5"):
        ranks = [row["rank"] for row in rows(folder, phase)]
        assert sorted(ranks) == list(range(len(ranks)))
        assert ranks != sorted(ranks)


def test_every_window_of_the_curriculum_holds_the_sources_in_proportion(corpus):
    folder, _ = corpus
    texts = [row["text"] for row in sorted(rows(folder, "phase5"), key=lambda r: r["rank"])]
    chinese = [sum("\u4e00" <= c <= "\u9fff" for c in t) > len(t) / 2 for t in texts if t]
    half = len(chinese) // 2
    assert sum(chinese) > 10
    assert abs(sum(chinese[:half]) - sum(chinese[half:])) <= 2


def test_the_same_interpreter_gives_the_same_corpus(corpus, tmp_path):
    _, manifest = corpus
    again = make_corpus(tmp_path / "again")
    assert json.dumps(again) == json.dumps(manifest)


def test_other_things_are_left_alone(tmp_path):
    path = tmp_path / "phase1/part-00000.zstd.parquet"  # as the published data is named
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        make_corpus(tmp_path)
    assert path.read_text() == "precious"


def test_an_altered_file_is_found_when_the_command_is_given_again(tmp_path):
    make_corpus(tmp_path)
    path = tmp_path / "phase3/part-00001.zstd.parquet"
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match="missing or was altered"):
        make_corpus(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="missing or was altered"):
        make_corpus(tmp_path)
