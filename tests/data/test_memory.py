"""A worker's memory does not grow with the input, nor with the size of its row groups."""

import subprocess
import sys

import pytest

from tests.data.conftest import sentences, write_parquet

PEAK = """
import sys
from kaiyuan.data.convert import convert
convert([sys.argv[1]], sys.argv[2], sys.argv[3], workers=1)
# Not getrusage: its peak is inherited from the process that started this one.
status = open("/proc/self/status").read()
print(int(status.split("VmHWM:")[1].split()[0]) / 1024)
"""


def peak_megabytes(path, output, tokenizer):
    command = [sys.executable, "-c", PEAK, str(path), str(output), str(tokenizer)]
    return float(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.slow
def test_a_row_group_of_two_gigabytes_of_text(qwen, tmp_path):
    """read_row_group fails on such a one, and holding it would take more than the bound."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = "\n".join(sentences(30))
    # The same texts of 10 KB again and again; every chunk shares their memory.
    chunk = pa.array([f"{number} {text}" for number in range(4000)])
    column = pa.chunked_array([chunk] * (1 + 2_200_000_000 // chunk.nbytes))
    path = tmp_path / "big.parquet"
    pq.write_table(pa.table({"text": column}), path, compression="zstd", use_dictionary=False)
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
