"""The whole chain on a toy model: a list of commands, each of which anyone could have typed."""

import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kaiyuan.config import load_params
from kaiyuan.files import make_folder, read_manifest
from kaiyuan.train import STOPPED

PROMPT = "The function returns"
_EXPORTED = "model"
_MADE = {
    "corpus": "the parquet files",
    "tokenizer": "the tokenizer's four files",
    "data": "the converted phases: .bin, .idx, order, manifest",
    "run": "checkpoints, losses, logs, report.html",
    _EXPORTED: "the Hugging Face model",
}

# Said before a step's commands.
_NOTES = {
    "train": "phases 1 and 2 are ended early (max_samples in the toy's data.yaml) to keep it short",
    "generate": "a model of 1.2 million parameters babbles after a minute of training; what counts "
    "is that the whole chain works",
}

Step = tuple[str, list[list[str]]]


def run_demo(out: Path, command: Callable[[Sequence[str]], Any], console: Console) -> None:
    """Run all steps; those that are done already are quick.

    Args:
        out: folder for everything that is made.
        command: runs one command line of kaiyuan and returns what its verb returns.
        console: for headings and the final table.

    Raises:
        UserError: a step failed, or ``out`` cannot be written to.
    """
    make_folder(out)
    begin = time.perf_counter()
    steps = list(_steps(out))
    difference = None
    for number, (title, commands) in enumerate(steps, start=1):
        console.rule(f"[bold]{number}/{len(steps)} {title}", align="left")
        if note := _NOTES.get(commands[0][0]):
            console.print(note, soft_wrap=True, highlight=False)
        for argv in commands:
            console.print(f"[cyan]$ kaiyuan {shlex.join(argv)}", soft_wrap=True, highlight=False)
            if argv[0] == "export":
                _remove_export(out / _EXPORTED)
            result = command(argv)
            if result == STOPPED:
                console.print(
                    f"kaiyuan demo --out {out} goes on from there", soft_wrap=True, highlight=False
                )
            if type(result) is int and result:  # an exit code: 130 after Ctrl-C
                raise SystemExit(result)
            difference = result if argv[0] == "compare" else difference
    console.print(f"logits of Megatron and transformers differ by at most {difference:.1e}\n")
    for name, content in _MADE.items():
        console.print(f"  {out / name!s:<20} {content}", highlight=False, soft_wrap=True)
    console.print(f"\n{time.perf_counter() - begin:.0f} s in all", highlight=False)


def _remove_export(folder: Path) -> None:
    """Remove the model that an earlier demo exported: the new one must be the last checkpoint's."""
    if folder.exists():
        read_manifest(folder, "hf_model")  # what is not ours stays
        shutil.rmtree(folder)


def _steps(out: Path) -> Iterator[Step]:
    corpus, tokenizer, data, run, exported = (
        str(out / name) for name in ("corpus", "tokenizer", "data", "run", _EXPORTED)
    )
    yield "Make a small corpus, laid out as the published data", [["corpus", "--output", corpus]]
    yield (
        "Train a tokenizer",
        [["train-tokenizer", "--input", corpus, "--output", tokenizer]],
    )
    yield (
        "Convert parquet to Megatron's .bin/.idx, in the order of the data",
        [
            [
                *("convert", "--input", f"{corpus}/{phase.name}"),
                *("--output", f"{data}/{phase.name}"),
                *("--tokenizer", tokenizer, "--order", phase.order),
            ]
            for phase in load_params("toy").phases
        ],
    )
    yield (
        "Train through all five phases",
        [["train", "toy", "--data", data, "--output", run, "--tokenizer", tokenizer]],
    )
    yield (
        "Export to Hugging Face, and compare with Megatron",
        [
            ["export", run, "--output", exported, "--dtype", "float32"],
            ["compare", run, exported],
        ],
    )
    yield (
        "Generate",
        [["generate", exported, "--prompt", PROMPT, "--max-new-tokens", "40"]],
    )
    yield "Report", [["report", run]]
