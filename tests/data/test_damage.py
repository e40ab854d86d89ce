"""Damaged inputs end with exit code 2 and one line, or with the right result; nothing between."""

import contextlib
import random
import sys

import pyarrow as pa
import pytest

from kaiyuan import cli
from kaiyuan.data import inputs
from kaiyuan.data.footer import FooterReader
from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.data.verify import verify, verify_against
from tests.data.conftest import sentences, write_parquet


def run(monkeypatch, capsys, *arguments):
    """Run the command line in this process; return its exit code and what it wrote to stderr."""
    monkeypatch.setattr(sys, "argv", ["kaiyuan", *map(str, arguments)])
    capsys.readouterr()
    try:
        cli.main()
    except SystemExit as end:
        return end.code or 0, capsys.readouterr().err
    return 0, capsys.readouterr().err


def cut(raw, rng):
    return raw[: rng.randrange(len(raw))]


def flip_bit(raw, rng):
    changed = bytearray(raw)
    changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_bit_of_footer(raw, rng):
    """The footer's own length and everything that it says of pages, sizes and types."""
    changed = bytearray(raw)
    length = int.from_bytes(raw[-8:-4], "little")
    changed[rng.randrange(len(raw) - 8 - length, len(raw))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwrite(raw, rng):
    changed = bytearray(raw)
    start = rng.randrange(len(raw))
    changed[start : start + 64] = rng.randbytes(len(changed[start : start + 64]))
    return bytes(changed)


def wrong_magic(raw, rng):
    at = rng.choice([slice(0, 4), slice(len(raw) - 4, len(raw))])
    changed = bytearray(raw)
    changed[at] = rng.randbytes(4)
    return bytes(changed)


@pytest.fixture(scope="module")
def footers():
    """One process for the footers of all files, which takes longer to start than a conversion."""
    with FooterReader() as reader:
        yield contextlib.nullcontext(reader)


KINDS = [cut, flip_bit, flip_bit_of_footer, overwrite, wrong_magic]


@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_thirty_damaged_files_of_a_kind(
    tmp_path, small, footers, monkeypatch, capsys, kind, compression
):
    import pyarrow.parquet as pq

    monkeypatch.setattr(inputs, "FooterReader", lambda *_: footers)
    rng = random.Random(f"{kind.__name__} {compression}")
    texts = [*sentences(150, longest=40), None, ""]
    ranks = pa.array(rng.sample(range(len(texts)), len(texts)), pa.int64())
    good = tmp_path / "good.parquet"
    table = pa.table({"text": texts, "rank": ranks})
    pq.write_table(table, good, row_group_size=60, compression=compression)
    raw = good.read_bytes()
    refused = 0
    for number in range(30):
        folder = tmp_path / str(number)
        path = folder / "in/part-00000.parquet"
        path.parent.mkdir(parents=True)
        path.write_bytes(kind(raw, rng))
        write_parquet(folder / "in/part-00001.parquet", text=["whole"], rank=[1000])
        code, error = run(
            monkeypatch, capsys, "convert", "--input", folder / "in", "--output", folder / "out",
            "--tokenizer", small.folder, "--order", "rank", "--workers", "1",
        )  # fmt: skip
        if code == 0:
            # Not noticed by parquet itself: whatever it reads must be what was converted.
            verify(folder / "out")
            verify_against(folder / "out", [folder / "in"], small.folder)
            phase = ConvertedPhase.open(folder / "out")
            assert phase.manifest["counts"]["rows"] == len(texts) + 1
            continue
        refused += 1
        assert code == 2, error
        lines = [line for line in error.splitlines() if not line.startswith("convert:")]
        assert len(lines) == 1, error
        assert "part-00000" in lines[0] or "'text'" in lines[0] or "rank" in lines[0]
        assert not (folder / "out/manifest.json").exists()
    if kind is cut:
        assert refused == 30


def test_debug_shows_the_traceback(tmp_path, monkeypatch, small):
    missing = ["convert", "--input", tmp_path / "none", "--output", tmp_path]
    command = ["kaiyuan", "--debug", *missing, "--tokenizer", small.folder]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    with pytest.raises(cli.UserError):
        cli.main()
