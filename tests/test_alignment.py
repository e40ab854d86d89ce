"""docs/alignment.md and the params say the same."""

import re
from pathlib import Path

import pytest
import yaml

from kaiyuan.config import load_params

DOCUMENT = Path(__file__).parent.parent / "docs" / "alignment.md"
GRADES = {"seed", "paper", "notes", "kin", "open", "ours"}
ROW = re.compile(r"^\| `([\w.]+)` \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def documented(model):
    section = DOCUMENT.read_text().split(f"\n## {model}\n")[1].split("\n## ")[0]
    return {name: (value, grades) for name, value, grades, _ in ROW.findall(section)}


def configured(model):
    params = load_params(model)
    values = {**params.model, **params.hparams}
    for phase in params.phases:
        settings = {"order": phase.order, "tokens": phase.tokens, "max_samples": phase.max_samples}
        given = {k: v for k, v in settings.items() if v is not None}
        values |= {f"{phase.name}.{k}": v for k, v in {**phase.hparams, **given}.items()}
    return values


@pytest.mark.parametrize("model", ["gpt_smoke", "qwen3_1p7b", "kaiyuan_2b_fp16"])
def test_table_and_params_agree(model):
    table, params = documented(model), configured(model)
    assert table.keys() == params.keys()
    for name, (value, _) in table.items():
        assert yaml.safe_load(value) == params[name] or float(value) == params[name], name


@pytest.mark.parametrize("model", ["gpt_smoke", "qwen3_1p7b", "kaiyuan_2b_fp16"])
def test_every_value_has_a_known_grade(model):
    for name, (_, grades) in documented(model).items():
        assert set(grades.split(", ")) <= GRADES, name


def test_what_the_seed_fixes_is_graded_so():
    for model, layers in (("gpt_smoke", "12"), ("qwen3_1p7b", "28")):
        value, grades = documented(model)["num_layers"]
        assert value == layers
        assert "seed" in grades


def test_the_unread_table_is_named():
    assert re.search(r"Table 11.*could not be read", DOCUMENT.read_text(), re.DOTALL)
