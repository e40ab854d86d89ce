"""The order index against Python's own stable sort, and its hash."""

import hashlib
import struct

import numpy as np
import pytest

from kaiyuan.data.order import RECORD, order_by_rank, order_hash

RNG = np.random.default_rng(0)
CASES = {
    "shuffled": RNG.permutation(5000),
    "with gaps": RNG.permutation(5000) * 1_000_003,
    "many equal": RNG.integers(0, 50, 5000),
    "negative and huge": RNG.integers(-(2**63), 2**63 - 1, 5000),
    "extremes": np.array([2**63 - 1, -(2**63), 0, -1, 1, 2**63 - 1]),
    "doubles": RNG.normal(size=5000),
    "double extremes": np.array([np.inf, -np.inf, 0.0, -0.0, 5e-324, -5e-324, 1e308, -1e308]),
    "whole doubles": RNG.permutation(5000).astype(float),
    "float32": RNG.normal(size=5000).astype(np.float32),
    "one": np.array([7]),
}


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_is_a_stable_sort(name, descending):
    ranks = CASES[name]
    sign = -1 if descending else 1
    values = ranks.tolist()
    expected = sorted(range(len(values)), key=lambda i: sign * values[i])
    order = order_by_rank(ranks, descending)
    found = list(range(len(values))) if order.ids is None else order.ids.tolist()
    assert found == expected
    assert order.duplicates == len(values) - len(set(values))


def test_sorted_input_needs_no_index():
    assert order_by_rank(np.array([1, 2, 2, 9])) == order_by_rank(np.array([0.5, 1, 1, 2]))
    assert order_by_rank(np.array([1, 2, 2, 9])).ids is None
    assert order_by_rank(np.array([9, 2, 2, 1]), descending=True).ids is None


def test_ids_are_int32():
    assert order_by_rank(np.array([2, 1])).ids.dtype == np.int32


def test_hash_is_over_file_row_and_tokens_in_training_order():
    records = np.array([(0, 5, 10), (0, 7, 11), (1, 0, 12)], RECORD)
    raw = b"".join(struct.pack("<iqi", *r) for r in [(1, 0, 12), (0, 5, 10), (0, 7, 11)])
    assert order_hash(records, np.array([2, 0, 1])) == hashlib.sha256(raw).hexdigest()
    assert order_hash(records, None) == order_hash(records, np.arange(3))


@pytest.mark.slow
def test_two_hundred_million_documents():
    """In under 60 seconds and 8 GB; run in a process of its own, so that the peak is its own."""
    import json
    import subprocess
    import sys

    code = """
import json, time
import numpy as np
from kaiyuan.data.order import RECORD, order_by_rank, order_hash
n = 200_000_000
ranks = np.random.default_rng(0).permutation(n)
start, cpu = time.monotonic(), time.process_time()
order = order_by_rank(ranks)
seconds, cpu = time.monotonic() - start, time.process_time() - cpu
assert np.array_equal(ranks[order.ids[:1000]], np.arange(1000))
del ranks
records = np.zeros(n, RECORD)
again, cpu_again = time.monotonic(), time.process_time()
order_hash(records, order.ids)
seconds += time.monotonic() - again
cpu += time.process_time() - cpu_again
status = open("/proc/self/status").read()
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print(json.dumps([seconds, cpu, peak]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    seconds, cpu, peak = json.loads(done.stdout)
    print(f"200,000,000 documents: {seconds:.1f} s ({cpu:.1f} s of one core), {peak / 1e9:.2f} GB")
    assert cpu < 60  # it uses one core; what other jobs take of that core is not ours
    assert peak < 8e9
