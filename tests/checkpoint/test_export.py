"""What an export holds beside the weights, and that it is whole and repeatable."""

import json
import shutil

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kaiyuan.checkpoint.describe import describe_checkpoint
from kaiyuan.checkpoint.export import KIND, export
from kaiyuan.checkpoint.import_hf import import_hf
from kaiyuan.checkpoint.load import TorchDistCheckpoint
from kaiyuan.checkpoint.safetensors_io import plan_shards, write_shards
from kaiyuan.data.convert import ENDOFTEXT
from kaiyuan.files import read_manifest, sha256_of
from tests.checkpoint.conftest import MODEL, STEPS, VOCAB


def test_transformers_loads_it_without_a_remark(hf):
    model, remarks = AutoModelForCausalLM.from_pretrained(hf, output_loading_info=True)
    assert not any(remarks.values())
    config = model.config
    assert config.rope_parameters["rope_theta"] == MODEL["rotary_base"]
    assert config.rms_norm_eps == MODEL["norm_epsilon"]
    assert config.vocab_size == VOCAB == model.get_input_embeddings().weight.shape[0]
    assert not config.tie_word_embeddings
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert not model.lm_head.weight.equal(model.get_input_embeddings().weight)


def test_rope_base_stands_in_the_old_and_in_the_new_key(hf):
    config = json.loads((hf / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == MODEL["rotary_base"]


def test_padding_is_removed(info, hf):
    stored = TorchDistCheckpoint(info.folder).tensors
    assert stored["output_layer.weight"].shape[0] == 1024
    (shard,) = hf.glob("*.safetensors")
    weights = load_file(shard)
    assert weights["lm_head.weight"].shape == (VOCAB, MODEL["hidden_size"])
    assert weights["model.embed_tokens.weight"].shape == (VOCAB, MODEL["hidden_size"])


def test_tokenizer_and_end_of_document(hf, tokenizer):
    theirs = AutoTokenizer.from_pretrained(hf)
    ours = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    text = "def f(x):\n    return x  # 注释"
    assert theirs(text)["input_ids"] == ours.encode(text).ids
    end = ours.token_to_id(ENDOFTEXT)
    assert json.loads((hf / "generation_config.json").read_text())["eos_token_id"] == end
    assert json.loads((hf / "config.json").read_text())["eos_token_id"] == end


def test_card_and_manifest_tell_of_the_training(hf, plan):
    phase = plan[0].phases[0]
    card = (hf / "README.md").read_text()
    for part in (f"after {STEPS} steps", f"{phase.tokens:,}", phase.data.content_hash, "0.01"):
        assert part in card
    manifest = read_manifest(hf, KIND)
    assert manifest["phases"][0]["content_hash"] == phase.data.content_hash
    assert set(manifest["files"]) == {p.name for p in hf.iterdir()} - {"manifest.json"}
    for name, entry in manifest["files"].items():
        assert entry == {"size": (hf / name).stat().st_size, "sha256": sha256_of(hf / name)}


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_import_export_gives_the_same_bytes(dtype, info, tmp_path):
    first = tmp_path / "first"
    export(info, first, dtype)
    import_hf(first, tmp_path / "imported")
    export(describe_checkpoint(tmp_path / "imported"), tmp_path / "second", dtype)
    assert contents(first) == contents(tmp_path / "second")


def test_a_moved_run_gives_the_same_bytes(info, hf, tmp_path):
    moved = shutil.copytree(info.folder.parent.parent, tmp_path / "moved")
    export(describe_checkpoint(moved), tmp_path / "again", "float32")
    assert contents(hf) == contents(tmp_path / "again")


def test_shards_are_cut_by_size_and_load(hf, tmp_path):
    (shard,) = hf.glob("*.safetensors")
    weights = load_file(shard)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    dtype = next(iter(weights.values())).dtype
    cut = plan_shards(shapes, dtype, most_bytes=200_000)
    assert [name for names in cut for name in names] == list(shapes)
    largest = max(tensor.nbytes for tensor in weights.values())
    assert largest > 200_000  # the embedding: a shard of its own
    for names in cut:
        assert len(names) == 1 or sum(weights[name].nbytes for name in names) <= 200_000
    model = shutil.copytree(hf, tmp_path / "model")
    for old in model.glob("model*"):
        old.unlink()
    write_shards(model, weights.items(), shapes, dtype, most_bytes=200_000)
    assert len(list(model.glob("*.safetensors"))) == len(cut) > 3
    loaded = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in weights.items())
