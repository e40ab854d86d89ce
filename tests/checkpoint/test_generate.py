"""Generated texts."""

import json
import shutil

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from kaiyuan.checkpoint.describe import describe_checkpoint
from kaiyuan.checkpoint.parity import megatron_logits
from kaiyuan.cli import app
from kaiyuan.errors import UserError
from kaiyuan.generate import exported, generate
from kaiyuan.sampling import Sampling
from tests.conftest import run_kaiyuan

PROMPT = "def load(self, name):\n"


def test_greedy_tokens_are_those_of_megatrons_forward_without_a_cache(info, hf, tokenizer):
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    prompt = encoder.encode(PROMPT).ids
    model = AutoModelForCausalLM.from_pretrained(hf)
    ids = model.generate(torch.tensor([prompt]), min_new_tokens=64, max_new_tokens=64)[0].tolist()
    assert len(ids) == len(prompt) + 64
    # min_new_tokens forbids the end of the document; Megatron is asked the same.
    logits = megatron_logits(info, [ids])[0]
    logits[:, encoder.token_to_id("<|endoftext|>")] = -torch.inf
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == ids[len(prompt) :]


def test_text_is_streamed_as_it_is_returned(hf):
    pieces: list[str] = []
    (text,) = generate(hf, [PROMPT], Sampling(max_new_tokens=32), on_text=pieces.append)
    assert len(pieces) > 1
    assert "".join(pieces) == text


def test_a_batch_gives_what_each_prompt_gives_alone(hf):
    prompts = [PROMPT, "import", "class Encoder(object):\n    def __init__(self"]
    sampling = Sampling(max_new_tokens=16)
    alone = [generate(hf, [prompt], sampling)[0] for prompt in prompts]
    assert generate(hf, prompts, sampling, batch_size=2) == alone


def test_sampling_repeats_with_the_seed(hf):
    def sample(seed):
        return generate(hf, [PROMPT], Sampling(32, temperature=1.5, top_p=0.95, seed=seed))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([], Sampling(), "empty prompt"),
        (["a", ""], Sampling(), "empty prompt"),
        (["a"], Sampling(max_new_tokens=128), "the model was trained on 128"),
        (["a"], Sampling(max_new_tokens=0), "at least 1"),
        (["a\udcff"], Sampling(), "is not UTF-8"),
        (["a"], Sampling(temperature=-1), "temperature must be a number from 0 on"),
        (["a"], Sampling(temperature=float("nan")), "temperature must be a number from 0 on"),
        (["a"], Sampling(temperature=1, seed=10**23), "seed must be a whole number from 0"),
        (["a"], Sampling(temperature=1, top_p=0), "above 0 and at most 1"),
        (["a"], Sampling(top_p=0.5), "give --temperature"),
    ],
)
def test_mistakes(prompts, sampling, message, hf):
    with pytest.raises(UserError, match=message):
        generate(hf, prompts, sampling)


def test_the_export_on_the_way_is_kept_and_never_stale(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    info = describe_checkpoint(copy)
    first = exported(info)
    made = (first / "manifest.json").stat().st_mtime_ns
    assert exported(info) == first
    assert (first / "manifest.json").stat().st_mtime_ns == made
    # Other weights under the same name.
    shutil.rmtree(info.folder)
    shutil.copytree(info.folder.parent / "iter_0000002", info.folder)
    second = exported(info)
    assert second != first
    assert not first.exists()
    shard = "model-00001-of-00001.safetensors"
    assert (second / shard).is_file()


def say(argv, capsys):
    """Run the command line here; return what a mistake is answered with, and what was printed."""
    with pytest.raises(UserError) as caught:
        app(["generate", *map(str, argv)], standalone_mode=False)
    return str(caught.value), capsys.readouterr().out


def test_mistakes_of_the_command_line_are_found_before_anything_is_printed(hf, tmp_path, capsys):
    empty, gap = tmp_path / "empty", tmp_path / "gap"
    empty.write_text("")
    gap.write_text("import\n\ndef f\n")
    for argv, sentence in {
        (): "give --prompt TEXT or --prompt-file FILE",
        ("--prompt-file", empty): "empty holds no prompt",
        ("--prompt-file", gap): f"line 2 of {gap} is empty",
        ("--prompt", "a", "--temperature", "nan"): "temperature must be a number",
        ("--prompt", "a", "--max-new-tokens", "128"): "the model was trained on 128",
    }.items():
        said, printed = say([hf, *argv], capsys)
        assert sentence in said
        assert printed == ""


def test_one_prompt_is_printed_before_its_text(hf, capfd):
    app(["generate", str(hf), "--prompt", PROMPT, "--max-new-tokens", "8"], standalone_mode=False)
    (text,) = generate(hf, [PROMPT], Sampling(max_new_tokens=8))
    assert capfd.readouterr().out == f"{PROMPT}{text}\n"


def test_command_line(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    prompts = tmp_path / "prompts"
    prompts.write_text("import\ndef f\n")
    done = run_kaiyuan("generate", copy, "--prompt-file", prompts, "--max-new-tokens", 4, "--json")
    answer = json.loads(done.stdout)
    assert [entry["prompt"] for entry in answer] == ["import", "def f"]
    assert all(entry["text"] for entry in answer)
