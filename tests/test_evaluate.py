"""Benchmarks by lm-eval, on task files of our own and without a network."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from kaiyuan.errors import UserError
from kaiyuan.evaluate import REPORT, Job, evaluate, load_harness, task_names

from .conftest import one_line_error, run_kaiyuan

QUESTIONS = [
    ("import", ["os", "the", "1234"]),
    ("def __init__", ["(self)", "banana", "return"]),
    ("return self", [".value", " if", " 7 7 7"]),
    ("for i in", ["range(10)", "el", "=="]),
    ("if x is", ["None", "def", "]"]),
    ("class Reader", ["(object)", "+ 1", "0.5"]),
]
PROMPTS = ["def load(self", "import os\n", "class Encoder"]
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def loaded(demo):
    """The exported toy in transformers, which the expected numbers come from."""
    folder = demo.folder / "model"
    return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)


def log_likelihood(loaded, before: str, after: str) -> float:
    """Sum of the log probabilities of the tokens of `after`."""
    tokenizer, model = loaded
    ids = tokenizer(before + after)["input_ids"]
    first = len(tokenizer(before)["input_ids"])
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].float()
    return sum(logits[i - 1].log_softmax(-1)[ids[i]].item() for i in range(first, len(ids)))


def greedy(loaded, prompt: str) -> str:
    tokenizer, model = loaded
    batch = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    return tokenizer.decode(out[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def write_task(folder: Path, name: str, documents: list[dict], config: dict) -> None:
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    common = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(common | config))


@pytest.fixture(scope="module")
def tasks(loaded, tmp_path_factory) -> Path:
    """Of the answers that are counted right, the model gives 4 of 6 and 2 of 3."""
    folder = tmp_path_factory.mktemp("tasks")
    choices = []
    for number, (question, options) in enumerate(QUESTIONS):
        scores = [log_likelihood(loaded, question, f" {option}") for option in options]
        best = scores.index(max(scores))
        right = best if number < 4 else (best + 1) % len(options)
        choices.append({"question": question, "options": options, "answer": right})
    write_task(
        folder,
        "local_choice",
        choices,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "options",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}],
        },
    )
    texts = [{"prompt": prompt, "text": greedy(loaded, prompt)} for prompt in PROMPTS]
    texts[1]["text"] += " and not this"
    write_task(
        folder,
        "local_text",
        texts,
        {
            "output_type": "generate_until",
            "doc_to_text": "prompt",
            "doc_to_target": "text",
            "generation_kwargs": {
                "until": ["<|endoftext|>"],
                "max_gen_toks": NEW_TOKENS,
                "do_sample": False,
            },
            "metric_list": [{"metric": "exact_match"}],
        },
    )
    return folder


@pytest.fixture(scope="module")
def evaluated(demo, tasks, tmp_path_factory) -> tuple[dict, Path]:
    """What the verb printed, and the folder that it wrote for a checkpoint of a run."""
    run = tmp_path_factory.mktemp("run") / "run"
    shutil.copytree(demo.folder / "run", run)
    done = run_kaiyuan(
        *("evaluate", run, "--tasks", "local_choice,local_text"),
        *("--include-path", tasks, "--tokenizer", demo.folder / "tokenizer", "--json"),
    )
    (output,) = (run / "checkpoints").glob("iter_*-eval")
    return json.loads(done.stdout), output


def test_scores_are_those_of_transformers(evaluated):
    summary, _ = evaluated
    results = summary["results"]
    assert results["local_choice"]["acc,none"] == pytest.approx(4 / 6)
    assert results["local_text"]["exact_match,none"] == pytest.approx(2 / 3)
    assert summary["documents"]["local_choice"] == {"original": 6, "effective": 6}


def test_every_answer_is_kept(evaluated, loaded):
    _, output = evaluated
    (samples,) = (output / "lm-eval").glob("samples_local_choice_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    for line, (question, options) in zip(lines, QUESTIONS, strict=True):
        got = [float(response[0]) for response in line["filtered_resps"]]
        expected = [log_likelihood(loaded, question, f" {option}") for option in options]
        assert got == pytest.approx(expected, abs=1e-2)
    assert len([*(output / "lm-eval").glob("results_*.json")]) == 1


def test_the_table_and_the_file_say_the_same(evaluated):
    summary, output = evaluated
    assert json.loads((output / "results.json").read_text()) == summary
    row = next(
        line
        for line in (output / "results.md").read_text().splitlines()
        if line.startswith("|local_choice")
    )
    assert "0.6667" in row and "|acc" in row
    assert summary["model_seal"] and summary["iteration"] > 0


def test_limit(demo, tasks, tmp_path):
    run_kaiyuan(
        *("evaluate", demo.folder / "model", "--tasks", "local_choice", "--limit", 2),
        *("--include-path", tasks, "--output", tmp_path / "out"),
    )
    summary = json.loads((tmp_path / "out" / "results.json").read_text())
    assert summary["documents"]["local_choice"] == {"original": 6, "effective": 2}
    assert summary["results"]["local_choice"]["acc,none"] == 1.0


def test_mistakes(demo, tasks, tmp_path, monkeypatch):
    model = demo.folder / "model"
    said = one_line_error("evaluate", model, "--tasks", "local_chioce", "--include-path", tasks)
    assert f"no task 'local_chioce' in {tasks}; did you mean 'local_choice'?" in said
    # The others in this process, which keeps its environment.
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(UserError, match="which tasks"):
        task_names(",")
    (tmp_path / "code.yaml").write_text("task: code\nunsafe_code: true\n")
    with pytest.raises(UserError, match="--run-code"):
        load_harness(Job(("code",), tmp_path))
    with pytest.raises(UserError, match="is not a folder"):
        load_harness(Job(("code",), tmp_path / "no"))


def test_an_output_that_cannot_be_written_is_found_before_the_model_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/lm-eval").touch()
    for output in (tmp_path / "file/out", tmp_path / "out"):
        with pytest.raises(UserError, match="cannot write to"):
            evaluate(tmp_path / "no model", Job(("code",)), None, output)


@pytest.mark.parametrize(
    "name", ["deep", "tagged", "by_tag", "named", "inline", "given", "all_given", "longproc"]
)
def test_groups_and_tags_with_tasks_that_run_code_ask_for_it(name, tmp_path, monkeypatch):
    import lm_eval.tasks

    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "0")  # which --run-code sets
    files = {
        "code": "task: code\nunsafe_code: true\ntag: tagged\n",
        "plain": "task: plain\n",
        "harmless": "group: harmless\ntask: [plain]\n",
        "named": "group: named\ntask: [plain, code]\n",
        "deep": "group: deep\ntask: [harmless, named]\n",
        "by_tag": "group: by_tag\ntask: [tagged]\n",
        "inline": "group: inline\ntask:\n - group: within\n   task:\n    - task: code\n",
        "given": "group: given\ntask:\n - task: plain\n   unsafe_code: true\n",
        "all_given": "group: all_given\ntask: [plain]\nunsafe_code: true\n",
        "round": "group: round\ntask: [round, plain]\n",
    }
    for file, text in files.items():
        (tmp_path / f"{file}.yaml").write_text(text)
    shutil.copytree(Path(lm_eval.tasks.__file__).parent / "longproc", tmp_path / "longproc")
    with pytest.raises(UserError, match=f"{name} .*runs code .*--run-code"):
        load_harness(Job((name,), tmp_path))
    assert load_harness(Job((name,), tmp_path, run_code=True))
    assert load_harness(Job(("harmless", "plain", "round"), tmp_path))


@pytest.fixture(scope="module")
def preset_index():
    import lm_eval.tasks

    home = Path(lm_eval.tasks.__file__).parent
    # Its index of everything takes half a minute; these are the folders that the preset is in.
    names = (
        "mmlu/default ceval cmmlu arc super_glue commonsense_qa hellaswag openbookqa piqa siqa "
        "winogrande gsm8k minerva_math benchmarks humaneval mbpp"
    )
    return lm_eval.tasks.TaskManager(
        include_path=[home / name for name in names.split()], include_defaults=False
    )


def test_lm_eval_knows_every_task_of_the_preset(preset_index):
    assert [name for name in REPORT if name not in preset_index.task_index] == []


def leaves(index: dict, name: str) -> list[str]:
    """The single tasks of a task, a group or a tag."""
    entry = index[name]
    if entry.kind.name == "TAG":
        return sorted(entry.tags)
    if entry.kind.name == "GROUP":
        return [leaf for part in entry.cfg["task"] for leaf in leaves(index, part)]
    return [name]


class ReachedTheDataError(Exception):
    """A task asks for its data: there is no network here."""


# Their modules fetch the metric from the hub when they are loaded.
NEED_THE_HUB_AT_ONCE = ("humaneval", "mbpp")
# Subjects that the papers of these benchmarks count.
SUBJECTS = {"mmlu": 57, "cmmlu": 67, "ceval-valid": 52, "minerva_math": 7}


@pytest.mark.parametrize("name", [name for name in REPORT if name not in NEED_THE_HUB_AT_ONCE])
def test_lm_eval_builds_each_task_of_the_preset_up_to_its_data(name, preset_index, monkeypatch):
    from lm_eval.api.task import ConfigurableTask

    def download(*_: object) -> None:
        raise ReachedTheDataError

    monkeypatch.setattr(ConfigurableTask, "download", download)
    singles = leaves(preset_index.task_index, name)
    assert len(singles) == SUBJECTS.get(name, 1)
    for single in singles:
        with pytest.raises(ReachedTheDataError):
            preset_index.load([single])
