"""Verbs of what a training leaves: checkpoints and the models in them."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from kaiyuan.cli.verbs import PathOrName, Verbs
from kaiyuan.errors import UserError

app = Verbs()

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
Checkpoint = Annotated[
    Path, typer.Argument(help="A run, its checkpoints folder, or one iteration's folder.")
]


@app.command("export")
def export_checkpoint(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Option(help="Folder to make.")],
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Of the weights.")
    ] = "bfloat16",
    model: ModelFile = None,
    vocab_size: VocabSize = None,
    tokenizer: TokenizerFolder = None,
) -> None:
    """Write a checkpoint as a Hugging Face Qwen3ForCausalLM folder.

    Example: kaiyuan export toy/run --output exported
    """
    from kaiyuan.checkpoint.describe import describe_checkpoint
    from kaiyuan.checkpoint.export import export

    info = describe_checkpoint(checkpoint, model, vocab_size, tokenizer)
    manifest = export(info, output, dtype)
    size = sum(file["size"] for file in manifest["files"].values())
    typer.echo(f"{info.folder} -> {output}: {size / 1e6:,.1f} MB, {dtype}")


@app.command("import")
def import_model(
    folder: Annotated[Path, typer.Argument(help="Folder with config.json and safetensors.")],
    output: Annotated[
        Path, typer.Option(help="Folder to make, for kaiyuan train ... pretrained_checkpoint=.")
    ],
) -> None:
    """Write a Hugging Face Qwen3ForCausalLM folder as a checkpoint that training starts from.

    Example: kaiyuan import exported --output imported
    """
    from kaiyuan.checkpoint.import_hf import import_hf

    import_hf(folder, output)
    typer.echo(f"{folder} -> {output}")


@app.command("average")
def average_checkpoints(
    run: Annotated[Path, typer.Argument(help="A run, or its checkpoints folder.")],
    output: Annotated[
        Path,
        typer.Option(help="Folder to make; kaiyuan train ... pretrained_checkpoint= takes it too."),
    ],
    last: Annotated[int | None, typer.Option(min=1, help="So many of the newest.")] = None,
    iterations: Annotated[str, typer.Option(help="These instead, as in 100,200,300.")] = "",
    decay: Annotated[
        float, typer.Option(help="Weight of a checkpoint over that of the next newer one.")
    ] = 1.0,
    model: ModelFile = None,
    vocab_size: VocabSize = None,
    tokenizer: TokenizerFolder = None,
) -> None:
    """Write the mean of checkpoints of a run as a checkpoint; export and training take it.

    Example: kaiyuan average toy/run --last 2 --output averaged
    """
    from kaiyuan.checkpoint.average import average, choose

    try:
        wanted = [int(number) for number in iterations.split(",") if number]
    except ValueError:
        raise UserError(f"--iterations takes numbers with commas, not {iterations!r}") from None
    chosen = choose(run, last, wanted)
    average(run, chosen, output, decay, model=model, vocab_size=vocab_size, tokenizer=tokenizer)
    typer.echo(f"mean of {', '.join(map(str, chosen))} -> {output}")


@app.command("generate")
def generate_text(
    checkpoint: CheckpointOrExported,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; repeatable.")] = None,
    prompt_file: Annotated[
        PathOrName | None, typer.Option(help="File with a prompt a line; - is the standard input.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="So many prompts at once.")] = 8,
    engine: Annotated[
        Literal["transformers", "megatron"],
        typer.Option(help="megatron takes its own, on the checkpoint itself."),
    ] = "transformers",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    model: ModelFile = None,
    vocab_size: VocabSize = None,
    tokenizer: TokenizerFolder = None,
) -> None:
    """Continue texts. For transformers a checkpoint is exported beside itself, and that is kept.

    Example: kaiyuan generate toy/run --prompt "def main(" --max-new-tokens 32
    """
    from kaiyuan.sampling import Sampling, check_prompts

    if prompt is None and prompt_file is None:
        raise UserError("there is nothing to continue: give --prompt TEXT or --prompt-file FILE")
    prompts = [*(prompt or []), *_prompt_lines(prompt_file)]
    check_prompts(prompts)
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    sampling.check()
    streamed = len(prompts) == 1 and not as_json and engine == "transformers"
    if engine == "megatron":
        from kaiyuan.checkpoint.describe import describe_checkpoint
        from kaiyuan.generate_megatron import generate_with_megatron

        if (checkpoint / "config.json").is_file():
            raise UserError(
                f"{checkpoint} is an exported model, --engine megatron takes a checkpoint: "
                "give the run, or make one with kaiyuan import"
            )
        info = describe_checkpoint(checkpoint, model, vocab_size, tokenizer)
        texts = generate_with_megatron(info, prompts, sampling, batch_size)
    else:
        from kaiyuan.generate import generate, model_folder

        folder, _ = model_folder(checkpoint, model, vocab_size, tokenizer)
        before = list(prompts)  # printed when all is checked, with the first piece of text

        def write(text: str) -> None:
            print(*before, text, sep="", end="", flush=True)
            before.clear()

        on_text = write if streamed else None
        texts = generate(folder, prompts, sampling, batch_size, on_text)
    pairs = zip(prompts, texts, strict=True)
    if streamed:
        typer.echo()
    elif as_json:
        answer = [{"prompt": before, "text": text} for before, text in pairs]
        typer.echo(json.dumps(answer, ensure_ascii=False))
    else:
        typer.echo("\n---\n".join(before + text for before, text in pairs))


@app.command()
def compare(
    checkpoint: Checkpoint,
    exported: Annotated[Path, typer.Argument(help="Folder that kaiyuan export made of it.")],
    text: Annotated[str, typer.Option(help="Text whose logits are compared.")] = (
        "def mean(values):\n    return sum(values) / len(values)\n"
    ),
) -> float:
    """Compare the logits of a checkpoint, in Megatron, with those of its export, in transformers.

    The exit code is 1 where they are not the same model. Example: kaiyuan compare toy/run toy/model
    """
    from kaiyuan.checkpoint.describe import describe_checkpoint
    from kaiyuan.checkpoint.parity import compare as verb

    comparison = verb(describe_checkpoint(checkpoint), exported, text)
    typer.echo(str(comparison))
    if not comparison.same:
        raise typer.Exit(1)
    return comparison.difference


@app.command()
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


@app.command()
def validate(
    run: Annotated[Path, typer.Argument(help="A run, or one checkpoint, as of average.")],
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


@app.command()
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
    verb(folder, host, port)


def _prompt_lines(file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    name, lines = "the standard input" if file == "-" else file, text.splitlines()
    if not lines:
        raise UserError(f"{name} holds no prompt")
    if "" in lines:
        raise UserError(f"line {lines.index('') + 1} of {name} is empty, where a prompt is due")
    return lines
