"""Models of transformers in Megatron."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import Qwen3Config, Qwen3ForCausalLM

from kaiyuan.checkpoint.describe import describe_checkpoint
from kaiyuan.checkpoint.export import export
from kaiyuan.checkpoint.import_hf import import_hf
from kaiyuan.checkpoint.parity import compare_logits
from kaiyuan.files import MANIFEST
from kaiyuan.runfolder import TRACKER
from tests.checkpoint.conftest import LAYOUTS, VOCAB, layout_arguments, with_arguments

CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 14,
    "max_position_embeddings": 128,
    "rms_norm_eps": 3e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 40_000.0},
    "initializer_range": 0.1,
}


def random_model(folder, dtype=torch.float32, tied=False):
    """Save a model of transformers, in which no weight is a constant."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG, tie_word_embeddings=tied))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "tied",
    [pytest.param(False, id="untied"), pytest.param(True, id="tied", marks=pytest.mark.slow)],
)
def test_megatron_has_the_logits_of_transformers(tied, tokens, tmp_path):
    model = random_model(tmp_path / "model", tied=tied)
    import_hf(model, tmp_path / "checkpoint")
    info = describe_checkpoint(tmp_path / "checkpoint")
    assert compare_logits(info, model, tokens) <= 1e-5


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_import_of_bfloat16_is_exact(tied, tokenizer, tmp_path):
    model = random_model(tmp_path / "model", torch.bfloat16, tied)
    import_hf(model, tmp_path / "checkpoint")
    info = describe_checkpoint(tmp_path / "checkpoint", tokenizer=tokenizer)
    export(info, tmp_path / "back", "bfloat16")
    (theirs,), (ours,) = (list(f.glob("*.safetensors")) for f in (model, tmp_path / "back"))
    before, after = load_file(theirs), load_file(ours)
    assert before.keys() == after.keys()
    assert all(t.dtype == torch.bfloat16 and t.equal(after[name]) for name, t in before.items())


def test_a_tokenizer_without_vocab_and_merges_is_completed(tokenizer, tmp_path):
    model = random_model(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, model / name)
    import_hf(model, tmp_path / "checkpoint")
    export(describe_checkpoint(tmp_path / "checkpoint"), tmp_path / "back")
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        assert (tmp_path / "back" / name).read_bytes() == (tokenizer / name).read_bytes()


def names_in(folder):
    """Return what a checkpoint has of the model: tensors, and TransformerEngine's extra states."""
    index = FileSystemReader(folder).read_metadata().state_dict_metadata
    others = ("optimizer", "opt_param_scheduler", "rng_state", "rerun_state_machine_state")
    return {name for name in index if not name.startswith(others)}


@pytest.mark.parametrize(
    "layout",
    [
        "tp2",
        pytest.param("pp2", marks=pytest.mark.slow),
        pytest.param("tp2pp2", marks=pytest.mark.slow),
    ],
)
def test_training_starts_from_an_import_at_any_layout(layout, hf, plan, tokenizer, tmp_path):
    """A step with rate 0 leaves the weights as they were loaded."""
    import_hf(hf, tmp_path / "imported")
    the_plan, data = plan
    frozen = {"lr": 0.0, "min_lr": 0.0, "weight_decay": 0.0, "exit_interval": 1}
    (phase,) = with_arguments(the_plan, layout_arguments(layout) | frozen).phases
    tp, pp = LAYOUTS[layout]
    # As kaiyuan train does.
    where = ["--load", str(tmp_path / "saved"), "--save", str(tmp_path / "saved")]
    where += ["--pretrained-checkpoint", str(tmp_path / "imported")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={tp * pp}", "-m", "kaiyuan.rank", *phase.argv]
    command += ["--data-path", str(data / "phase1"), *where]
    log = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert log.returncode == 0, log.stdout[-2000:] + log.stderr[-2000:]
    assert (tmp_path / "saved" / TRACKER).read_text() == "1"
    assert names_in(tmp_path / "saved" / "iter_0000001") == names_in(tmp_path / "imported/release")
    shutil.copyfile(tmp_path / "imported" / MANIFEST, tmp_path / "saved" / MANIFEST)
    saved = describe_checkpoint(tmp_path / "saved", tokenizer=tokenizer)
    export(saved, tmp_path / "back", "float32")
    (ours,), (theirs,) = (list(f.glob("*.safetensors")) for f in (tmp_path / "back", hf))
    assert ours.read_bytes() == theirs.read_bytes()
