"""Verbs that measure and serve a model; kaiyuan/cli.py puts them on the command line."""

import json
from pathlib import Path
from typing import Annotated

import typer

ModelFile = Annotated[
    Path | None,
    typer.Option("--model", help="File of Megatron arguments, where there is no run.json."),
]
VocabSize = Annotated[
    int | None, typer.Option(help="Entries of the vocabulary, where there is no run.json.")
]
TokenizerFolder = Annotated[
    Path | None, typer.Option("--tokenizer", help="Folder of the tokenizer, if not the run's own.")
]
CheckpointOrExported = Annotated[
    Path, typer.Argument(help="A run, an iteration's folder, or an exported model.")
]


def evaluate(
    checkpoint: CheckpointOrExported,
    tasks: Annotated[str, typer.Option(help="lm-eval's names with commas, or the preset report.")],
    include_path: Annotated[
        Path | None, typer.Option(help="Folder of task files to use instead of lm-eval's; offline.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="So many documents of each task; all by default.")
    ] = None,
    shots: Annotated[
        int | None, typer.Option(min=0, help="Solved examples; else as the task says.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 8,
    run_code: Annotated[
        bool, typer.Option("--run-code", help="Admit tasks that run code the model wrote.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder; beside the model by default, NAME-eval.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    model: ModelFile = None,
    vocab_size: VocabSize = None,
    tokenizer: TokenizerFolder = None,
) -> None:
    """Measure a model on benchmarks, with lm-eval. A checkpoint is exported beside itself first.

    Example: kaiyuan evaluate toy/run --tasks hellaswag,arc_easy --limit 100
    """
    from kaiyuan import evaluate as verb

    job = verb.Job(verb.task_names(tasks), include_path, limit, shots, batch_size, run_code)
    index = verb.load_harness(job)
    from kaiyuan.generate import model_folder

    folder, name = model_folder(checkpoint, model, vocab_size, tokenizer)
    output = output or name.with_name(f"{name.name}-eval")
    summary = verb.evaluate(folder, job, index, output)
    if as_json:
        typer.echo(json.dumps(summary, ensure_ascii=False, indent=1))
    else:
        typer.echo((output / "results.md").read_text(encoding="utf-8"))
        typer.echo(f"results: {output}")


def validate(
    run: Annotated[Path, typer.Argument(help="A run, or its checkpoints folder.")],
    data: Annotated[Path, typer.Option(help="Folder of a converted phase that was held out.")],
    samples: Annotated[
        int | None, typer.Option(min=1, help="So many samples, evenly over the data; else all.")
    ] = None,
) -> None:
    """Measure loss and bits per byte of every checkpoint of a run on held-out data, as a curve.

    Example: kaiyuan validate toy/run --data toy/data/phase5 --samples 100
    """
    from kaiyuan.validate import Validation, draw_points, write_points

    validation = Validation(run, data, samples)
    if validation.trained_on:
        typer.echo(f"the run was trained on {data}: this is not held-out data", err=True)
    table, picture = (validation.name.with_suffix(end) for end in (".csv", ".png"))
    points = []
    for point in validation:
        typer.echo(
            f"iteration {point.iteration}: loss {point.loss:.4f}, "
            f"{point.bits_per_byte:.4f} bits per byte"
        )
        points.append(point)
        # After each, because a checkpoint can take minutes.
        write_points(points, table)
    draw_points(points, picture)
    typer.echo(f"curve: {table}, {picture}")


def serve(
    checkpoint: CheckpointOrExported,
    host: Annotated[str, typer.Option(help="Address to listen on; no one is asked for a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=1, max=65535, help="TCP port.")] = 8000,
    model: ModelFile = None,
    vocab_size: VocabSize = None,
    tokenizer: TokenizerFolder = None,
) -> None:
    """Serve a model as OpenAI's completions (POST /v1/completions). Ctrl-C ends it.

    Example: kaiyuan serve toy/run --port 8000
    """
    from kaiyuan.generate import model_folder
    from kaiyuan.serve import serve as verb

    folder, _ = model_folder(checkpoint, model, vocab_size, tokenizer)
    typer.echo(f"serving http://{host}:{port}/v1/completions, model {folder}", err=True)
    verb(folder, host, port)
