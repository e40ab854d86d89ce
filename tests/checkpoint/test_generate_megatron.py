"""Texts of Megatron's inference engine, on a CPU; tests/gpu has the same on CUDA."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from kaiyuan.cli.models import generate_text
from kaiyuan.errors import UserError
from kaiyuan.generate import generate
from kaiyuan.generate_megatron import generate_with_megatron
from kaiyuan.sampling import Sampling
from tests.checkpoint.conftest import MODEL, VOCAB
from tests.checkpoint.engine_calls import NEW_TOKENS, ask_engine

# Of unequal lengths, so that a batch starts with the shortest of them.
PROMPTS = ["def load(self, name):\n", "import", "class Encoder(object):\n    def __init__(self"]


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[list[int]]:
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids = [encoder.encode(prompt).ids for prompt in PROMPTS]
    assert len({len(prompt) for prompt in ids}) == 3
    return ids


@pytest.fixture(scope="module")
def answers(info, prompts):
    return ask_engine(info, prompts)


def transformers_tokens(hf, prompt, end=None) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(hf)
    model.generation_config.eos_token_id = end
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS)
    return out[0, len(prompt) :].tolist()


def test_greedy_tokens_are_those_of_transformers(answers, prompts, hf):
    expected = [transformers_tokens(hf, prompt) for prompt in prompts]
    assert all(len(tokens) == NEW_TOKENS for tokens in expected)
    assert answers["greedy"] == expected


def test_greedy_tokens_are_those_of_megatrons_forward_without_a_cache(answers):
    assert answers["greedy"] == answers["without a cache"]


def test_a_batch_gives_what_each_prompt_gives_alone(answers):
    assert answers["greedy"] == answers["alone"]


def test_sampling_repeats_with_the_seed(answers):
    assert answers["seed 0"] == answers["seed 0 again"]
    assert answers["seed 0"] != answers["seed 1"]
    assert answers["seed 1"] != answers["likeliest only"]
    assert answers["likeliest only"] == [tokens[:16] for tokens in answers["greedy"]]


def test_the_end_of_a_document_ends_a_text(answers, prompts, hf):
    end = answers["greedy"][1][5]
    for new, prompt in zip(answers["stopped"], prompts, strict=True):
        expected = transformers_tokens(hf, prompt, end)
        assert new == [token for token in expected if token != end]
    assert len(answers["stopped"][1]) <= 5


def test_padding_of_the_vocabulary_is_never_chosen(answers):
    assert max(map(max, answers["seed 0"])) < VOCAB
    assert answers["large padding"] == answers["greedy"][:1]


def test_the_verb_gives_the_texts_of_transformers(run, hf, tmp_path, capsys):
    file = tmp_path / "prompts"
    file.write_text("import\ndef f\n")
    generate_text(run, prompt_file=file, max_new_tokens=16, engine="megatron", as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert [entry["prompt"] for entry in answer] == ["import", "def f"]
    assert [entry["text"] for entry in answer] == generate(hf, ["import", "def f"], Sampling(16))


def test_mistakes(info, run, hf):
    with pytest.raises(UserError, match="the model was trained on 128"):
        generate_with_megatron(info, ["a"], Sampling(MODEL["max_position_embeddings"]))
    with pytest.raises(UserError, match="empty prompt"):
        generate_with_megatron(info, ["a", ""], Sampling())
    with pytest.raises(UserError, match="is an exported model, --engine megatron takes a check"):
        generate_text(hf, prompt=["a"], engine="megatron")
