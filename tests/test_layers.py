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


@pytest.mark.parametrize("check", ["merge_over_ranks", "split_sequence"])
def test_ranks_with_parts_of_the_vocabulary_or_the_sequence_agree(check, tmp_path):
    ranks = [start(check, RANK=str(r), STORE=str(tmp_path / "store")) for r in (0, 1)]
    for process in ranks:
        out, _ = process.communicate()
        assert process.returncode == 0, out
