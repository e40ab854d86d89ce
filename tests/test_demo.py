"""The demo, run once as a newcomer runs it."""

import csv
import json
import re

import pyarrow.parquet as pq
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from kaiyuan.config import load_params
from kaiyuan.demo import run_demo
from kaiyuan.estimate import num_parameters
from kaiyuan.plan import make_plan

PHASES = ["phase1", "phase2", "phase3", "phase4", "phase5"]


def losses(folder):
    with (folder / "run" / "loss.csv").open() as stream:
        return list(csv.DictReader(stream))


def test_every_step_shows_its_command_and_its_figures(demo):
    verbs = re.findall(r"^\$ kaiyuan (\S+)", demo.output, re.M)
    assert list(dict.fromkeys(verbs)) == [
        *("corpus", "train-tokenizer", "convert", "train", "export", "compare"),
        *("generate", "report"),
    ]
    # Those whose table has far fewer tokens trained on than there are.
    early = [phase.name for phase in load_params("toy").phases if phase.max_samples]
    assert early == ["phase1", "phase2"]
    assert "\nphases 1 and 2 are ended early (max_samples" in demo.output
    for phase in PHASES:
        row = re.search(rf"^ *{phase} +([\d,]+) +([\d,]+) +([\d,]+) +([\d,]+) ", demo.output, re.M)
        assert row, phase
        counts = json.loads((demo.folder / "data" / phase / "manifest.json").read_text())["counts"]
        shown = [int(figure.replace(",", "")) for figure in row.groups()]
        assert shown[:3] == [counts[name] for name in ("rows", "documents", "tokens")]


def test_rows_are_documents_and_those_without_text(demo):
    for phase in PHASES:
        files = sorted((demo.folder / "corpus" / phase).glob("*.parquet"))
        texts = [t for f in files for t in pq.read_table(f)["text"].to_pylist()]
        with_text = [text for text in texts if text]
        assert 0 < len(with_text) < len(texts)
        converted = demo.folder / "data" / phase
        shards = json.loads((converted / "manifest.json").read_text())["shards"]
        # Megatron's own reader counts.
        read = [IndexedDataset(str(converted / shard["prefix"])) for shard in shards]
        assert sum(len(shard) for shard in read) == len(with_text)


def test_the_loss_falls(demo):
    rows = losses(demo.folder)
    values = [float(row["loss"]) for row in rows]
    assert sum(values[-10:]) / 10 < sum(values[:10]) / 10 - 1
    assert [int(row["iteration"]) for row in rows] == list(range(1, len(rows) + 1))
    assert list(dict.fromkeys(row["phase"] for row in rows)) == PHASES


def test_learning_rates_are_the_plan_of_the_report_in_small(demo):
    rates = {phase: [] for phase in PHASES}
    for row in losses(demo.folder):
        rates[row["phase"]].append(float(row["learning_rate"]))
    peak, middle = max(rates["phase1"]), rates["phase3"][0]
    warm_up = [peak * (k + 1) / 10 for k in range(10)]
    assert rates["phase1"][:10] == pytest.approx(warm_up, rel=1e-6)
    assert set(rates["phase1"][10:]) == {peak}
    assert set(rates["phase2"] + rates["phase3"] + rates["phase4"]) == {middle}
    # The report's ratios: 5e-3, 3e-3, and from there to 6e-4 as 1 - sqrt(r).
    assert middle / peak == pytest.approx(3 / 5)
    steps = len(rates["phase5"])
    for k, rate in enumerate(rates["phase5"], start=1):
        shape = 1 - (k / steps) ** 0.5
        assert abs(rate / middle - (0.2 + 0.8 * shape)) < 1e-6


def test_the_exported_model_is_a_qwen3_that_says_what_megatron_says(demo):
    difference = re.search(r"largest difference of the logits of (\d+) tokens: (\S+)", demo.output)
    assert difference
    assert int(difference[1]) > 8
    assert float(difference[2]) <= 1e-4
    model = AutoModelForCausalLM.from_pretrained(demo.folder / "model")
    assert isinstance(model, Qwen3ForCausalLM)
    config = model.config
    # Sizes of which no two agree, so that a swapped dimension cannot go unseen.
    assert config.num_attention_heads * config.head_dim != config.hidden_size
    assert config.num_key_value_heads != config.num_attention_heads
    tokenizer = AutoTokenizer.from_pretrained(demo.folder / "model")
    text = "def 学习(x):\n    return x  # learn"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_it_generates_a_text_and_draws_the_loss(demo):
    assert "\na model of 1.2 million parameters babbles" in demo.output
    assert num_parameters(make_plan(load_params("toy")).phases[0].arguments) == 1_249_984
    said = demo.output.split("--max-new-tokens 40\n")[1].split("7/7")[0]
    assert said.startswith("The function returns")
    assert len(said) > len("The function returns") + 10
    assert (demo.folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_time_trains_nothing(demo, kaiyuan):
    before = losses(demo.folder)
    output = kaiyuan("demo", "--out", demo.folder).stdout
    assert [line for line in output.splitlines() if ": done (" in line] == [
        f"{phase}: done ({end} steps)" for phase, end in ends(before)
    ]
    assert losses(demo.folder) == before


def ends(rows):
    return {row["phase"]: int(row["iteration"]) for row in rows}.items()


def test_a_stopped_demo_says_how_to_go_on(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run_demo(tmp_path / "toy", lambda argv: 75 if argv[0] == "train" else None, Console())
    assert ended.value.code == 75
    assert " ".join(capsys.readouterr().out.split()).endswith("toy goes on from there")
