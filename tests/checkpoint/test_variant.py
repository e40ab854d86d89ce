"""KaiyuanForCausalLM: sandwich norm and a cap on the logits, in Megatron and in transformers."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from kaiyuan.checkpoint.describe import describe_checkpoint
from kaiyuan.checkpoint.export import export
from kaiyuan.checkpoint.import_hf import import_hf
from kaiyuan.checkpoint.modeling_kaiyuan import KaiyuanConfig, KaiyuanForCausalLM
from kaiyuan.checkpoint.parity import megatron_logits, transformers_logits
from kaiyuan.errors import UserError
from kaiyuan.generate import Sampling, generate
from kaiyuan.serve import serve
from kaiyuan.validate import load_model
from tests.checkpoint.test_import import CONFIG

# So low that it changes every logit.
CAP = 1.5


@pytest.fixture(scope="module")
def original(tokenizer, tmp_path_factory):
    """A model with random weights, as transformers saves it."""
    folder = tmp_path_factory.mktemp("original") / "model"
    torch.manual_seed(0)
    config = KaiyuanConfig(**CONFIG, sandwich_norm=True, final_logit_softcapping=CAP)
    model = KaiyuanForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def info(original, tmp_path_factory):
    folder = tmp_path_factory.mktemp("imported") / "checkpoint"
    import_hf(original, folder)
    return describe_checkpoint(folder)


@pytest.fixture(scope="module")
def hf(info, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(info, folder, "float32")
    return folder


@pytest.fixture(scope="module")
def expected(info, tokens):
    return megatron_logits(info, tokens)


def weights_of(folder):
    (shard,) = folder.glob("*.safetensors")
    return shard, load_file(shard)


def test_megatron_and_transformers_agree(info, hf, expected, tokens):
    assert abs(transformers_logits(hf, tokens) - expected).max() <= 1e-5
    assert abs(expected).max() < CAP
    with torch.inference_mode():
        in_memory = load_model(info)(torch.tensor(tokens)).logits
    assert abs(in_memory.numpy() - expected).max() <= 1e-5


def test_weights_come_back_as_they_were(original, hf):
    before, after = weights_of(original)[1], weights_of(hf)[1]
    assert before.keys() == after.keys()
    assert all(tensor.equal(after[name]) for name, tensor in before.items())
    norms = [name for name in after if "post_self_attn" in name or "post_mlp" in name]
    assert len(norms) == 2 * CONFIG["num_hidden_layers"]


def test_another_cap_and_swapped_norms_are_seen(hf, expected, tokens, tmp_path):
    mutated = shutil.copytree(hf, tmp_path / "model")
    config = json.loads((hf / "config.json").read_text())
    for change in ({"final_logit_softcapping": None}, {"sandwich_norm": False}):
        (mutated / "config.json").write_text(json.dumps(config | change))
        assert abs(transformers_logits(mutated, tokens) - expected).max() > 1e-2
    (mutated / "config.json").write_text(json.dumps(config))
    shard, weights = weights_of(mutated)
    one, other = (f"model.layers.1.post_{n}_layernorm.weight" for n in ("self_attn", "mlp"))
    save_file(weights | {one: weights[other], other: weights[one]}, shard, {"format": "pt"})
    assert abs(transformers_logits(mutated, tokens) - expected).max() > 2e-4


STRANGER = """
import sys, torch
from transformers import AutoModelForCausalLM
folder, out, tokens = sys.argv[1], sys.argv[2], eval(sys.argv[3])
try:
    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    sys.exit("loaded without its code")
except ValueError:
    pass
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
with torch.inference_mode():
    torch.save(model(torch.tensor(tokens)).logits, out)
assert model.generate(torch.tensor(tokens)[:, :5], max_new_tokens=3).shape[1] <= 8
assert not any(name.split(".")[0] == "kaiyuan" for name in sys.modules)
"""


def test_transformers_loads_it_where_kaiyuan_is_not(hf, expected, tokens, tmp_path):
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    environment |= {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, hf, tmp_path / "logits.pt", str(tokens)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    theirs = torch.load(tmp_path / "logits.pt").numpy()
    assert abs(theirs - expected).max() <= 1e-5


def test_no_code_of_a_folder_is_run_here(hf, tmp_path):
    folder = shutil.copytree(hf, tmp_path / "model")
    evil = f"open({str(tmp_path / 'evil')!r}, 'w')\n"
    code = folder / "modeling_kaiyuan.py"
    code.write_text(evil + code.read_text())
    sampling = Sampling(max_new_tokens=8)
    assert generate(folder, ["def f("], sampling) == generate(hf, ["def f("], sampling)
    assert not (tmp_path / "evil").exists()


def test_it_is_not_taken_for_a_qwen3(info, hf, tmp_path):
    plain = {k: v for k, v in info.model.items() if k != "sandwich_norm"}
    with pytest.raises(UserError, match=r"does not have: .*post_layernorm"):
        export(dataclasses.replace(info, model=plain), tmp_path / "hf")
    with pytest.raises(UserError, match="code of its own"):
        serve(hf, "127.0.0.1", 0)


def test_numbers_too_large_for_float16_are_refused(original, tmp_path):
    model = shutil.copytree(original, tmp_path / "model")
    shard, weights = weights_of(model)
    weights["model.norm.weight"][3] = 7e4
    save_file(weights, shard, {"format": "pt"})
    import_hf(model, tmp_path / "checkpoint")
    info = describe_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(UserError, match=r"model.norm.weight .* too large for float16"):
        export(info, tmp_path / "hf", "float16")
    assert not (tmp_path / "hf").exists()
    export(info, tmp_path / "hf", "bfloat16")
