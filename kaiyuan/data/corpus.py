"""A small real corpus, laid out as the published data is, made from what Python ships.

Code and English prose are the standard library's sources and documentation strings, its topics of
``help()`` and its licence; Chinese prose is a page of our own and the standard library's encoding
test data, where the interpreter has them. Five folders of zstd parquet come out: ``text`` in phases
1 and 2, ``text`` and ``rank`` in phases 3 to 5, with null and empty rows in between, and with the
rows of the last three not in the order of their rank.

The same interpreter always gives the same rows.
"""

import ast
import dataclasses
import random
import sysconfig
import warnings
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kaiyuan.errors import UserError
from kaiyuan.files import atomic_folder, atomic_write, read_manifest, sha256_of, write_manifest

SOURCES = ("code", "english", "chinese")

# Megabytes of text a phase, and what share of the best documents it takes. As in the report, the
# share shrinks from phase to phase, so that the best documents come back.
_PHASES = (
    ("phase1", 6.2, 1.0),
    ("phase2", 3.5, 0.8),
    ("phase3", 0.25, 0.5),
    ("phase4", 0.25, 0.3),
    ("phase5", 0.25, 0.1),
)
_RANKED = ("phase3", "phase4", "phase5")
_FILES_PER_PHASE = 3
_SEED = 1  # of what is drawn, and of the order of the rows
_LONGEST = 4_000  # characters of a document; longer files are cut into several


@dataclasses.dataclass(frozen=True)
class _Document:
    text: str
    source: str
    score: float


def make_corpus(output: Path) -> dict[str, Any]:
    """Write the corpus, unless it is there already.

    Args:
        output: a new or empty folder that gets ``phase1`` to ``phase5`` and a manifest.

    Returns:
        The manifest: for each phase its files (with size and SHA-256), rows, null and empty rows,
        and bytes of text.

    Raises:
        UserError: it is there, and one of its files is not what was written; or the folder holds
            something else, or cannot be written.
    """
    if (output / "manifest.json").exists():
        manifest = read_manifest(output, "corpus")
        _check_files(output, manifest)
        return manifest
    with atomic_folder(output) as folder:  # begun before the texts are gathered, in seconds
        documents = {source: sorted(_documents(source), key=_by_score) for source in SOURCES}
        phases = []
        for number, (name, megabytes, share) in enumerate(_PHASES):
            rng = random.Random(_SEED + number)
            chosen = _choose(documents, int(megabytes * 1e6), share, rng)
            ranked = name in _RANKED
            rows = list(enumerate(_interleave(chosen))) if ranked else list(enumerate(chosen))
            phases.append(_write_phase(folder / name, rows, ranked, rng))
        return write_manifest(folder, "corpus", {"seed": _SEED, "phases": phases})


def _check_files(output: Path, manifest: dict[str, Any]) -> None:
    for phase in manifest["phases"]:
        for file in phase["files"]:
            path = output / phase["name"] / file["name"]
            if not path.is_file() or sha256_of(path) != file["sha256"]:
                raise UserError(
                    f"{path} is missing or was altered: remove {output} and give the same command "
                    "again"
                )


def _by_score(document: _Document) -> tuple[float, str]:
    return document.score, document.text


def _documents(source: str) -> Iterator[_Document]:
    texts = {"code": _code, "english": _english, "chinese": _chinese}[source]()
    for text in texts:
        for start in range(0, len(text), _LONGEST):
            piece = text[start : start + _LONGEST]
            # A stand-in for a quality classifier: the share of letters, highest in prose.
            yield _Document(piece, source, sum(c.isalpha() for c in piece) / len(piece))


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not {"site-packages", "dist-packages", "lib2to3", "__pycache__"} & set(parts):
            yield path


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):  # test data with other encodings
        return ""


def _code() -> Iterator[str]:
    for path in _standard_library():
        # The tests are many times the library; a tenth keeps the mixture near the library's own.
        text = _read(path)
        if len(text) > 200 and ("test" not in path.parts or len(text) % 10 == 0):
            yield text


def _english() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    for path in _standard_library():
        if "test" in path.parts:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in old sources
                tree = ast.parse(_read(path))
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) > 200:
                    yield text


def _chinese() -> Iterator[str]:
    own = resources.files("kaiyuan.data").joinpath("passages_zh.txt").read_text(encoding="utf-8")
    yield from own.strip().split("\n\n")
    folder = Path(sysconfig.get_paths()["stdlib"]) / "test" / "cjkencodings"
    for name in ("gb18030", "gbk", "gb2312", "big5"):
        path = folder / f"{name}-utf8.txt"
        if path.exists():
            yield _read(path)


def _choose(
    documents: dict[str, list[_Document]], size: int, share: float, rng: random.Random
) -> list[_Document]:
    """Draw documents from the best of each source until the phase has its size.

    A source that runs out is drawn from again, as the small curated sets of the published data
    are repeated; Chinese is one document in five.
    """
    best = {name: docs[int(len(docs) * (1 - share)) :] for name, docs in documents.items()}
    pools: dict[str, list[_Document]] = {name: [] for name in best}
    chosen: list[_Document] = []
    while size > 0:
        source = rng.choices(SOURCES, weights=(2, 2, 1))[0]
        if not pools[source]:
            pools[source] = rng.sample(best[source], len(best[source]))
        document = pools[source].pop()
        chosen.append(document)
        size -= len(document.text.encode())
    return chosen


def _interleave(chosen: list[_Document]) -> list[_Document]:
    """Order by quality within each source, all sources in constant proportion.

    Algorithm 1 of the report: document r of the n of its source gets the place r / n, and the
    places are sorted.
    """
    placed = []
    for source in SOURCES:
        mine = sorted((d for d in chosen if d.source == source), key=_by_score)
        placed += [((r + 1) / len(mine), source, d) for r, d in enumerate(mine)]
    return [document for _, _, document in sorted(placed, key=lambda item: item[:2])]


def _write_phase(
    folder: Path, rows: list[tuple[int, _Document]], ranked: bool, rng: random.Random
) -> dict[str, Any]:
    texts: list[tuple[int, str | None]] = [(rank, document.text) for rank, document in rows]
    # What a converter has to expect: rows without a text.
    num_null, num_empty = 5, 7
    texts += [(len(rows) + i, None if i < num_null else "") for i in range(num_null + num_empty)]
    rng.shuffle(texts)
    files = []
    for number in range(_FILES_PER_PHASE):
        mine = texts[number::_FILES_PER_PHASE]
        columns = {"text": pa.array([text for _, text in mine], pa.string())}
        if ranked:
            columns["rank"] = pa.array([rank for rank, _ in mine], pa.int64())
        path = folder / f"part-{number:05d}.zstd.parquet"
        with atomic_write(path) as stream:
            pq.write_table(pa.table(columns), stream, compression="zstd", row_group_size=200)
        files.append({"name": path.name, "size": path.stat().st_size, "sha256": sha256_of(path)})
    return {
        "name": folder.name,
        "files": files,
        "rows": len(texts),
        "null": num_null,
        "empty": num_empty,
        "text_bytes": sum(len(document.text.encode()) for _, document in rows),
    }
