"""A worker's memory does not grow with the input, nor with the size of its row groups."""

import json
import subprocess
import sys

import pytest

from tests.data.conftest import sentences, write_parquet

PEAK = """
import json, resource, sys
from kaiyuan.data.convert import convert
convert([sys.argv[1]], sys.argv[2], sys.argv[3], workers=1)
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
"""


def peak_megabytes(path, output, tokenizer):
    command = [sys.executable, "-c", PEAK, str(path), str(output), str(tokenizer)]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.slow
def test_a_row_group_of_two_gigabytes_of_text(qwen, tmp_path):
    """read_row_group fails on such a one, and holding it would take more than the bound."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = "\n".join(sentences(3000))
    texts = [f"{number} {text}" for number in range(2_200_000_000 // len(text.encode()))]
    column = pa.chunked_array([pa.array(texts[i::4]) for i in range(4)])
    path = tmp_path / "big.parquet"
    pq.write_table(pa.table({"text": column}), path, compression="zstd", use_dictionary=False)
    del texts, column
    assert pq.ParquetFile(path).metadata.num_row_groups == 1
    peak = peak_megabytes(path, tmp_path / "out", qwen)
    print(f"peak of a worker: {peak:.0f} MB")
    assert peak < 1024


@pytest.mark.slow
def test_four_times_the_input_takes_no_more(qwen, tmp_path):
    texts = sentences(20_000)
    peaks = []
    for times in (1, 4):
        for part in range(times):
            write_parquet(tmp_path / f"{times}/{part}.parquet", 2000, text=texts)
        folder = tmp_path / str(times)
        peaks.append(peak_megabytes(folder, tmp_path / f"out{times}", qwen))
    print(f"peaks: {peaks[0]:.0f} and {peaks[1]:.0f} MB")
    assert peaks[1] < peaks[0] + 64
