"""The layers and the loss on a CPU; tests/gpu has the kernels that take their place on CUDA."""

import importlib.util
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
        "sandwich_norm",
        "fallbacks_are_megatrons",
    ],
)
def test_check(check):
    process = start(check)
    out, _ = process.communicate()
    assert process.returncode == 0, out


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs Triton")
@pytest.mark.parametrize("check", ["loss_kernels", "layer_kernels"])
def test_kernels_in_tritons_interpreter(check):
    process = start(check, TRITON_INTERPRET="1")
    out, _ = process.communicate()
    assert process.returncode == 0, out


def on_ranks(number, check, tmp_path):
    store = str(tmp_path / "store")
    ranks = [start(check, RANK=str(rank), STORE=store) for rank in range(number)]
    for process in ranks:
        out, _ = process.communicate()
        assert process.returncode == 0, out
    return out


@pytest.mark.parametrize(
    ("number", "check"),
    [(2, "merge_over_ranks"), (2, "split_sequence"), (3, "overlapped_products")],
)
def test_ranks_with_parts_agree(number, check, tmp_path):
    on_ranks(number, check, tmp_path)


def test_nodes_that_see_different_files_are_named(tmp_path):
    said = on_ranks(2, "nodes_disagree", tmp_path)
    assert "the data is not the same everywhere: ranks 1 see other data than rank 0" in said
    assert "is not shared: ranks 1 do not see what rank 0 writes there" in said
