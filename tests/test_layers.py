"""The layers and the loss on a CPU; tests/gpu has the kernels that take their place on CUDA."""

import os
import subprocess
import sys

import pytest

from .conftest import ROOT


def start(check: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.layer_checks", check],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    "check",
    [
        "packed_documents",
        "key_cache",
        "losses_are_megatrons",
        "checkpoint_names",
        "fallbacks_are_megatrons",
    ],
)
def test_check(check):
    process = start(check)
    out, _ = process.communicate()
    assert process.returncode == 0, out


@pytest.mark.parametrize(
    ("check", "number"),
    [("merge_over_ranks", 2), ("split_sequence", 2), ("overlapped_products", 3)],
)
def test_ranks_with_parts_agree(check, number, tmp_path):
    store = str(tmp_path / "store")
    ranks = [start(check, RANK=str(rank), STORE=store) for rank in range(number)]
    for process in ranks:
        out, _ = process.communicate()
        assert process.returncode == 0, out
