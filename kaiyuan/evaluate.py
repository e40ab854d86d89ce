"""Scores of a model on benchmarks, by lm-eval's harness and with its definitions of the tasks."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kaiyuan.errors import UserError
from kaiyuan.files import MANIFEST, atomic_write, make_folder, read_manifest, write_json

# What the report on Kaiyuan-2B measures (knowledge and reasoning, Chinese, mathematics, code), as
# lm-eval calls it. C-Eval's answers are public for its validation split only.
REPORT = (
    "mmlu",
    "ceval-valid",
    "cmmlu",
    "arc_easy",
    "arc_challenge",
    "boolq",
    "commonsense_qa",
    "hellaswag",
    "openbookqa",
    "piqa",
    "social_iqa",
    "winogrande",
    "gsm8k",
    "minerva_math",
    "humaneval",
    "mbpp",
)
PRESETS = {"report": REPORT}


@dataclass(frozen=True)
class Job:
    """What to measure.

    Attributes:
        tasks: names of tasks, groups or tags.
        include_path: folder with task files; then these are all the tasks there are, and nothing
            is fetched. Without it the tasks are lm-eval's own, whose data come from the hub.
        limit: so many of the documents of each task; all by default.
        shots: solved examples before each question; as many as the task asks for by default.
        batch_size: sequences at once.
        run_code: admit tasks that run code which the model wrote.
    """

    tasks: tuple[str, ...]
    include_path: Path | None = None
    limit: int | None = None
    shots: int | None = None
    batch_size: int = 8
    run_code: bool = False


def task_names(text: str) -> tuple[str, ...]:
    """Return the tasks of a list with commas, those of a preset in its place.

    Raises:
        UserError: there is none.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UserError("say which tasks: --tasks report, or names with commas")
    return tuple(dict.fromkeys(name for word in words for name in PRESETS.get(word, (word,))))


def load_harness(job: Job) -> Any:
    """Return lm-eval's index of the tasks, after holding the job against it.

    This must run before anything imports huggingface_hub, which reads at its import whether it
    may use the network.

    Raises:
        UserError: lm-eval is not installed, a task is not known, or one runs code unasked.
    """
    if job.include_path is not None:
        if not job.include_path.is_dir():
            raise UserError(f"{job.include_path} is not a folder")
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    if job.run_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"  # asked for by the metric of HumanEval and MBPP
    try:
        import accelerate  # noqa: F401  (lm-eval needs it for models of transformers)
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise UserError(
            f"evaluate needs {error.name}, which is not installed: pip install 'kaiyuan[eval]'"
        ) from None
    index = TaskManager(
        include_path=job.include_path and str(job.include_path),
        include_defaults=job.include_path is None,
    )
    _check_tasks(job, index.task_index)
    return index


def _check_tasks(job: Job, index: dict[str, Any]) -> None:
    where = f"in {job.include_path}" if job.include_path else "of that name in lm-eval"
    for name in job.tasks:
        if name not in index:
            near = difflib.get_close_matches(name, index, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UserError(f"there is no task {name!r} {where}{hint}")
        if not job.run_code and _runs_code(name, index, set()):
            raise UserError(
                f"{name} is or has a task that runs code that the model writes: give --run-code, "
                "in a container that may break, or leave it out"
            )


def _runs_code(part: Any, index: dict[str, Any], seen: set[str]) -> bool:
    """Tell whether a task runs code, or one that a group or a tag has.

    Args:
        part: a name, or what stands in a group's file: a member with values of its own, a list.
        index: lm-eval's, by name.
        seen: names that were looked at.
    """
    if isinstance(part, list):
        return any(_runs_code(each, index, seen) for each in part)
    if isinstance(part, dict):
        members = [part.get("group"), part.get("task")]
        return bool(part.get("unsafe_code")) or _runs_code(members, index, seen)
    if part in seen or part not in index:
        return False
    seen.add(part)
    entry = index[part]
    # The tags of a task are those that it has, those of a tag are its tasks.
    members = sorted(entry.tags) if entry.cfg is None else entry.cfg
    return _runs_code(members, index, seen)


def evaluate(hf_folder: Path, job: Job, index: Any, output: Path) -> dict[str, Any]:
    """Measure a model and write what came out.

    Args:
        hf_folder: an exported model.
        job: what to measure.
        index: see :func:`load_harness`.
        output: folder for results.json, results.md (the table) and lm-eval/, which holds the
            harness's own file of results and for each task every request and answer. The first
            two are replaced, files of the harness accumulate.

    Returns:
        What is in results.json. The scores are under "results", by task and by lm-eval's names
        for them, such as "acc,none".

    Raises:
        UserError: the output cannot be written to; nothing is measured then.
    """
    for folder in (output, output / "lm-eval"):  # whose saving only warns where it fails
        make_folder(folder)
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker

    from kaiyuan.checkpoint.hf_config import register_variant

    register_variant()
    tracker = EvaluationTracker(output_path=str(output / "lm-eval" / "results.json"))
    found = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(hf_folder), "dtype": "auto"},
        tasks=list(job.tasks),
        num_fewshot=job.shots,
        batch_size=job.batch_size,
        device="cuda" if torch.cuda.is_available() else "cpu",
        limit=job.limit,
        evaluation_tracker=tracker,
        task_manager=index,
        confirm_run_unsafe_code=job.run_code,
    )
    samples = found.pop("samples")
    tracker.save_results_aggregated(results=found, samples=samples)
    for name in found["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    summary = _summary(hf_folder, job, found)
    write_json(output / "results.json", summary)
    with atomic_write(output / "results.md", "w") as stream:
        stream.write(_tables(found) + "\n")
    return summary


def _summary(hf_folder: Path, job: Job, found: dict[str, Any]) -> dict[str, Any]:
    from importlib.metadata import version

    known = read_manifest(hf_folder, "hf_model") if (hf_folder / MANIFEST).is_file() else {}
    return {
        "model": str(hf_folder),
        "model_seal": known.get("seal"),
        "iteration": known.get("iteration"),
        "lm_eval": version("lm_eval"),
        "limit": job.limit,
        "shots": found["n-shot"],
        "versions": found["versions"],
        "documents": found["n-samples"],
        "results": found["results"],
    }


def _tables(found: dict[str, Any]) -> str:
    from lm_eval.utils import make_table

    columns = ["results", *(["groups"] if found.get("groups") else [])]
    return "\n".join(make_table(found, column) for column in columns)
