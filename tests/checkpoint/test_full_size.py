"""Time and memory with a model of the size of Kaiyuan-2B.

Takes 25 GB of disk and minutes: ``pytest -m slow tests/checkpoint/test_full_size.py -s``.
"""

import json
import shutil
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from kaiyuan.checkpoint.describe import CheckpointInfo, iteration_folder
from kaiyuan.checkpoint.hf_config import sizes_of
from kaiyuan.checkpoint.save import write_torch_dist
from kaiyuan.files import write_manifest
from kaiyuan.runfolder import RUN_FILE, TRACKER

pytestmark = pytest.mark.slow

PARAMETERS = 2_031_739_904
MODEL = {
    "num_layers": 28,
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 16,
    "group_query_attention": True,
    "num_query_groups": 8,
    "kv_channels": 128,
    "max_position_embeddings": 4096,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "qk_layernorm": True,
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "make_vocab_size_divisible_by": 1187,
}
VOCAB = 151_936


@pytest.fixture(scope="module")
def big_run(tmp_path_factory, tokenizer):
    """A run of eight checkpoints in bf16, which share the data of two."""
    run = tmp_path_factory.mktemp("big") / "run"
    checkpoints = run / "checkpoints"
    checkpoints.mkdir(parents=True)
    info = CheckpointInfo(run, 0, MODEL, VOCAB, tokenizer)
    noise = torch.randn(1 << 20).mul_(0.02)

    def read(entry, shift):
        count = torch.Size(entry.megatron_shape).numel()
        repeated = noise.roll(shift + (entry.layer or 0)).repeat(-(-count // len(noise)))
        return repeated[:count].view(entry.megatron_shape).to(torch.bfloat16)

    for number in (0, 1):
        folder = iteration_folder(checkpoints, number + 1)
        write_torch_dist(folder, sizes_of(info), lambda entry, n=number: read(entry, 1000 * n))
    for number in range(2, 8):
        original = iteration_folder(checkpoints, number % 2 + 1)
        iteration_folder(checkpoints, number + 1).symlink_to(original)
    (checkpoints / TRACKER).write_text("8")
    body = {"model": MODEL, "vocab_size": VOCAB, "tokenizer": str(tokenizer)}
    write_manifest(run, "run", body, RUN_FILE)
    yield run
    shutil.rmtree(run)


@pytest.fixture
def output(tmp_path):
    yield tmp_path / "output"
    shutil.rmtree(tmp_path / "output")


def measured(*arguments):
    """Run kaiyuan; return seconds, and bytes of memory at the peak."""
    code = (
        "import resource, sys; from kaiyuan.cli import app; app(standalone_mode=False);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    start = time.monotonic()
    out = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds, peak = time.monotonic() - start, int(out.stdout.split()[-1]) * 1024
    print(f"\n{arguments[0]}: {seconds:.1f} s, {peak / 1e9:.2f} GB")
    return seconds, peak


def test_export_of_two_billion_parameters(big_run, output):
    seconds, peak = measured("export", big_run, "--output", output)
    assert seconds <= 90
    assert peak <= 4e9
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * PARAMETERS
    model, remarks = AutoModelForCausalLM.from_pretrained(
        output, dtype="auto", output_loading_info=True
    )
    assert not any(remarks.values())
    assert model.num_parameters() == PARAMETERS
    assert model.dtype == torch.bfloat16


def test_average_of_eight(big_run, output):
    _, peak = measured("average", big_run, "--last", 8, "--output", output)
    assert peak <= 6e9
