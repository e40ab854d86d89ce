"""Samples against Megatron's own builder of sample indices, and by hand."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kaiyuan.data.convert import convert
from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.data.samples import OrderedDataset
from kaiyuan.data.tokenizer import train_tokenizer
from kaiyuan.errors import UserError

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]


@pytest.fixture(scope="module")
def phase(tmp_path_factory) -> ConvertedPhase:
    """300 documents of 0 to 60 words, ranks in random order."""
    folder: Path = tmp_path_factory.mktemp("phase")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(0, 60))) for _ in range(300)]
    train_tokenizer(texts, folder / "tokenizer", 300)
    table = pa.table({"text": texts, "rank": rng.permutation(300)})
    pq.write_table(table, folder / "part.parquet", row_group_size=50)
    inputs = [folder / "part.parquet"]
    convert(inputs, folder / "out", folder / "tokenizer", order="rank", workers=1)
    return ConvertedPhase.open(folder / "out")


@pytest.mark.parametrize("length", [8, 64, 500])
def test_samples_are_cut_as_megatron_cuts_them(phase, length):
    from megatron.core.datasets import helpers

    dataset = OrderedDataset(phase, length)
    # Megatron: (place in the document index, offset) of the beginning of every sample.
    index = helpers.build_sample_idx(
        phase.document_lengths(), phase.order(), length, 1, phase.num_tokens, True, 1
    )
    assert len(dataset) == len(index) - 1
    for i in range(len(dataset)):
        expected = np.concatenate(
            [
                phase.tokens(int(phase.order()[place]))[
                    index[i, 1] if place == index[i, 0] else 0 : index[i + 1, 1] + 1
                    if place == index[i + 1, 0]
                    else None
                ]
                for place in range(index[i, 0], index[i + 1, 0] + 1)
            ]
        )
        sample = dataset[i]
        np.testing.assert_array_equal(sample["tokens"], expected[:-1])
        np.testing.assert_array_equal(sample["labels"], expected[1:])


def test_samples_join_without_gap_or_overlap(phase):
    dataset = OrderedDataset(phase, 32)
    stream = np.concatenate([phase.tokens(int(d)) for d in phase.order()])
    read = np.concatenate([dataset[i]["tokens"].numpy() for i in range(len(dataset))])
    np.testing.assert_array_equal(read, stream[: len(read)])
    assert len(stream) - len(read) <= 32  # only the tail is left out


def test_the_end_of_a_document_is_learned(phase):
    sample = OrderedDataset(phase, 500)[0]
    ends = sample["labels"] == phase.eod
    assert ends.any()
    assert sample["loss_mask"][ends].min() == 1


def test_a_phase_that_is_too_short_is_named(phase):
    with pytest.raises(UserError, match="too few for one sample of 1000000"):
        OrderedDataset(phase, 1_000_000)
