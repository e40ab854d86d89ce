"""Damaged and foreign checkpoints are refused with names, and nothing is written."""

import dataclasses
import json
import os
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from kaiyuan.checkpoint.describe import describe_checkpoint
from kaiyuan.checkpoint.export import export
from kaiyuan.checkpoint.hf_config import canonical_model, from_config, sizes_of
from kaiyuan.checkpoint.import_hf import import_hf
from kaiyuan.checkpoint.load import INDEX, ModelTensors, TorchDistCheckpoint
from kaiyuan.checkpoint.parity import compare
from kaiyuan.checkpoint.save import write_torch_dist
from kaiyuan.errors import UserError
from kaiyuan.generate import model_folder
from kaiyuan.runfolder import RUN_FILE, TRACKER
from kaiyuan.serve import serve
from tests.conftest import one_line_error


@pytest.fixture
def broken(run, tmp_path):
    """A copy of a run, to be damaged."""
    return describe_checkpoint(shutil.copytree(run, tmp_path / "run"))


def refuses(info, tmp_path, *messages):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError) as caught:
        export(info, tmp_path / "hf")
    for message in messages:
        assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


def edit_index(folder, change):
    """Change the index of a checkpoint that was made here."""
    index = pickle.loads((folder / INDEX).read_bytes())
    change(index)
    (folder / INDEX).write_bytes(pickle.dumps(index))


def rename(index, old, new):
    index.state_dict_metadata[new] = index.state_dict_metadata.pop(old)
    for key in [k for k in index.storage_data if k.fqn == old]:
        moved = dataclasses.replace(key, fqn=new)
        index.storage_data[moved] = index.storage_data.pop(key)


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "vocab_size": 256,
    "rope_theta": 10000,
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            "rotary embeddings of type 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rotary embeddings of type 'linear'"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers = '4', which is no number"),
        ({"num_hidden_layers": 4.5}, "num_hidden_layers = 4.5, which is no whole number"),
        ({"head_dim": True}, "head_dim = True, which is no number"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6', which is no number"),
        ({"vocab_size": "256"}, "vocab_size = '256', which is no number"),
    ],
)
def test_a_config_that_is_not_plain_is_refused(change, said):
    assert from_config(QWEN3 | {"rope_scaling": None})[0]["num_layers"] == 2
    with pytest.raises(UserError) as caught:
        from_config(QWEN3 | change)
    assert said in str(caught.value)


def test_cut_data(broken, tmp_path):
    data = next(broken.folder.glob("*.distcp"))
    os.truncate(data, data.stat().st_size - 1)
    refuses(broken, tmp_path, "incomplete", data.name, "bytes of")


def test_missing_data(broken, tmp_path):
    data = next(broken.folder.glob("*.distcp"))
    data.unlink()
    refuses(broken, tmp_path, "incomplete", f"{data.name} is missing")


def test_overwritten_data(broken, tmp_path):
    data = next(broken.folder.glob("*.distcp"))
    data.write_bytes(bytes(data.stat().st_size))
    refuses(broken, tmp_path, "is damaged: at byte", data.name)


def test_missing_index(broken, tmp_path):
    (broken.folder / INDEX).unlink()
    refuses(broken, tmp_path, "not a complete torch_dist checkpoint")


def test_cut_index(broken, tmp_path):
    index = broken.folder / INDEX
    os.truncate(index, index.stat().st_size // 2)
    refuses(broken, tmp_path, "is not the index of a checkpoint")


def test_missing_tensor(broken, tmp_path):
    def drop(index):
        del index.state_dict_metadata["decoder.final_layernorm.weight"]

    edit_index(broken.folder, drop)
    refuses(broken, tmp_path, "lacks 1 tensors of the model: decoder.final_layernorm.weight")


def test_surplus_and_misnamed_tensors(broken, tmp_path):
    old, new = "decoder.layers.mlp.linear_fc2.weight", "decoder.layers.mlp.linear_fc3.weight"
    edit_index(broken.folder, lambda index: rename(index, old, new))
    refuses(broken, tmp_path, "decoder.layers.0.mlp.linear_fc2.weight")
    edit_index(broken.folder, lambda index: rename(index, new, old))
    edit_index(
        broken.folder,
        lambda index: index.state_dict_metadata.update(
            {"decoder.layers.post_norm.weight": index.state_dict_metadata[old]}
        ),
    )
    edit_index(
        broken.folder,
        lambda index: index.storage_data.update(
            {
                dataclasses.replace(k, fqn="decoder.layers.post_norm.weight"): v
                for k, v in list(index.storage_data.items())
                if k.fqn == old
            }
        ),
    )
    refuses(broken, tmp_path, "does not have: decoder.layers.post_norm.weight")


def test_a_missing_part(broken, tmp_path):
    def drop(index):
        index.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"].chunks.pop()

    edit_index(broken.folder, drop)
    refuses(broken, tmp_path, "the parts of decoder.layers.mlp.linear_fc1.weight do not make up")


def test_a_part_in_the_place_of_another(broken, tmp_path):
    def move(index):
        """Give the gate of layer 0 once more in the place of its upper half."""
        name = "decoder.layers.mlp.linear_fc1.weight"
        gate, up = index.state_dict_metadata[name].chunks[:2]
        assert tuple(up.offsets) == (0, 200, 0)
        (place,) = (
            v for k, v in index.storage_data.items() if (k.fqn, k.offset) == (name, gate.offsets)
        )
        up.offsets = torch.Size([0, 100, 0])
        index.storage_data[MetadataIndex(name, up.offsets)] = place

    edit_index(broken.folder, move)
    refuses(broken, tmp_path, "the parts of decoder.layers.mlp.linear_fc1.weight do not make up")


@pytest.mark.parametrize("key", ["num_layers", "ffn_hidden_size", "num_query_groups"])
def test_another_shape(key, broken, tmp_path):
    model = broken.model | {key: broken.model[key] + 1}
    if key == "num_query_groups":
        model[key] = 3
    refuses(dataclasses.replace(broken, model=model), tmp_path, "decoder.layers.", "is due")


def test_another_vocabulary(broken, tmp_path):
    # 1,024 rows are not what 1,025 or 151,936 entries are padded to.
    for vocab_size in (1025, 151_936):
        other = dataclasses.replace(broken, vocab_size=vocab_size)
        refuses(other, tmp_path, "embedding.word_embeddings.weight is [1024, 96]")
    # They might be 900, but the tokenizer has more.
    other = dataclasses.replace(broken, vocab_size=900)
    refuses(other, tmp_path, "ids up to 1,002", "another vocabulary")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite(number, broken, tmp_path):
    tensors = ModelTensors(TorchDistCheckpoint(broken.folder), sizes_of(broken))

    def read(entry):
        tensor = tensors.read(entry).clone()
        if entry.layer == 1 and entry.rule.megatron == "mlp.linear_fc2.weight":
            tensor[3, 5] = number
        return tensor

    folder = broken.folder.with_name("iter_0000009")
    write_torch_dist(folder, sizes_of(broken), read)
    bad = dataclasses.replace(broken, folder=folder)
    refuses(bad, tmp_path, "decoder.layers.1.mlp.linear_fc2.weight holds 1 numbers")


def test_an_index_that_would_run_code_does_not(broken, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/evil",)

    (broken.folder / INDEX).write_bytes(pickle.dumps(Evil()))
    refuses(broken, tmp_path, "posix.system")
    assert not (tmp_path / "evil").exists()


def test_an_index_that_leads_out_of_its_folder(broken, tmp_path):
    def lead_out(index):
        for place in index.storage_data.values():
            place.relative_path = "../" + place.relative_path

    edit_index(broken.folder, lead_out)
    refuses(broken, tmp_path, "outside of its folder")


def test_a_model_that_qwen3_cannot_be(broken, tmp_path):
    for change in ({"add_qkv_bias": True}, {"swiglu": False}, {"qk_layernorm": False}):
        other = dataclasses.replace(broken, model=broken.model | change)
        refuses(other, tmp_path, f"the model has {next(iter(change))} =")


def test_tokenizers(broken, tmp_path):
    refuses(dataclasses.replace(broken, tokenizer=None), tmp_path, "give --tokenizer")
    other = shutil.copytree(broken.tokenizer, tmp_path / "tokenizer")
    (other / "merges.txt").unlink()
    refuses(dataclasses.replace(broken, tokenizer=other), tmp_path, "merges.txt missing")


def test_an_output_that_exists(broken, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "precious").touch()
    refuses(broken, tmp_path, "exists already")


def test_an_iteration_that_was_being_written_is_not_taken(broken):
    shutil.copytree(broken.folder, broken.folder.with_name("iter_0000010"))
    assert describe_checkpoint(broken.folder.parent.parent).iteration == 8


def test_no_checkpoint(broken, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        describe_checkpoint(tmp_path / "nowhere")
    (broken.folder.parent / TRACKER).unlink()
    with pytest.raises(UserError, match="no complete checkpoint"):
        describe_checkpoint(broken.folder.parent.parent)


def test_a_checkpoint_without_a_description(broken, tmp_path):
    (broken.folder.parent.parent / RUN_FILE).unlink()
    with pytest.raises(UserError, match="give --model FILE and --vocab-size N"):
        describe_checkpoint(broken.folder)
    file = tmp_path / "model.json"  # JSON is YAML
    file.write_text(json.dumps({k.replace("_", "-"): v for k, v in broken.model.items()}))
    info = describe_checkpoint(broken.folder, file, broken.vocab_size, broken.tokenizer)
    # 1e-06 is a text in YAML; it must become the number.
    assert info.model["norm_epsilon"] == "1e-06"
    assert canonical_model(info.model) == canonical_model(broken.model)
    assert info.iteration == 8


HF_DAMAGE = {
    "lacks 1 tensors of the model: model.norm.weight": lambda w: w.pop("model.norm.weight"),
    "does not have: model.extra": lambda w: w.update({"model.extra": torch.ones(3)}),
    "model.norm.weight is [95] where [96] is due": lambda w: w.update(
        {"model.norm.weight": torch.ones(95)}
    ),
    "model.norm.weight holds 1 numbers": lambda w: w["model.norm.weight"][5:6].fill_(torch.nan),
}


@pytest.mark.parametrize("message", HF_DAMAGE)
def test_damaged_models_are_not_imported(message, hf, tmp_path):
    model = shutil.copytree(hf, tmp_path / "model")
    (shard,) = model.glob("*.safetensors")
    weights = load_file(shard)
    HF_DAMAGE[message](weights)
    save_file(weights, shard)
    with pytest.raises(UserError) as caught:
        import_hf(model, tmp_path / "checkpoint")
    assert message in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "only Qwen3ForCausalLM is known"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_theta": 5.0}, "one base of the rotary embedding"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "type 'yarn'"),
        ({"vocab_size": 1004}, "does not fit its config.json: model.embed_tokens.weight"),
        ({"architectures": 5}, "the model is 5, only Qwen3ForCausalLM is known"),
        ({"architectures": [["x"]]}, "only Qwen3ForCausalLM is known"),
        ({"rope_parameters": "x"}, "rope_parameters = 'x', which is no table"),
        ({"rope_theta": "x"}, "rope_theta = 'x', which is no number"),
        ({"hidden_size": "x"}, "hidden_size = 'x', which is no number"),
        ({"num_hidden_layers": float("inf")}, "num_hidden_layers = inf, which is no whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0, where at least 1 is needed"),
        ({"vocab_size": "x"}, "vocab_size = 'x', which is no number"),
        ({"vocab_size": None}, "vocab_size = None, which is no number"),
    ],
)
def test_foreign_configurations_are_not_imported(change, message, hf, tmp_path):
    model = shutil.copytree(hf, tmp_path / "model")
    config = json.loads((model / "config.json").read_text()) | change
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        import_hf(model, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("content", ["{", "[]", "\x00"])
def test_a_configuration_that_cannot_be_read_is_refused_by_all_verbs(content, hf, broken, tmp_path):
    model = shutil.copytree(hf, tmp_path / "model")
    (model / "config.json").write_text(content)
    for read in (
        lambda: import_hf(model, tmp_path / "checkpoint"),
        lambda: serve(model, "127.0.0.1", 8000),
        lambda: compare(broken, model, "x"),
        lambda: model_folder(model),
    ):
        with pytest.raises(UserError, match=r"config\.json"):
            read()
    line = one_line_error("serve", model)
    assert "config.json" in line


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("[]", "is not an index of safetensors"),
        ("{", "is not an index of safetensors"),
        ('{"weight_map": 5}', "is not an index of safetensors"),
        ('{"weight_map": {"a": 5, "b": "x"}}', "is not a complete model: it has no 5"),
    ],
)
def test_an_index_of_shards_that_is_none_is_refused(index, said, hf, tmp_path):
    model = shutil.copytree(hf, tmp_path / "model")
    (model / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=said):
        import_hf(model, tmp_path / "checkpoint")


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": "abc"},
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"num_attention_heads": "x"},
        {"rotary_base": "x"},
        {"output_logit_cap": "x"},
        {"make_vocab_size_divisible_by": "x"},
        {"num_layers": -1},
    ],
    ids=str,
)
def test_a_file_of_arguments_with_other_than_numbers_is_refused(change, broken, tmp_path):
    file = tmp_path / "model.json"
    model = {k: v for k, v in broken.model.items() if k != "kv_channels"}
    file.write_text(json.dumps(model | change))
    info = describe_checkpoint(broken.folder, file, broken.vocab_size, broken.tokenizer)
    (name, value), *_ = change.items()
    refuses(info, tmp_path, f"the model has {name} = {value!r}")


def test_the_command_line_says_it_in_one_line(broken, tmp_path):
    data = next(broken.folder.glob("*.distcp"))
    data.unlink()
    line = one_line_error("export", broken.folder, "--output", tmp_path / "hf")
    assert f"{data.name} is missing" in line
    assert not (tmp_path / "hf").exists()
