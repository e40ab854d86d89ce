"""The command line: one thin function a verb.

Verbs import what they need when they run, so that ``kaiyuan --help`` stays instant.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from kaiyuan import __version__, cli_models
from kaiyuan.cli_models import CheckpointOrExported, ModelFile, TokenizerFolder, VocabSize
from kaiyuan.errors import UserError

app = typer.Typer(
    name="kaiyuan",
    help="Reproduce the pre-training of Kaiyuan-2B on Megatron, from parquet to a talking model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kaiyuan {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Options that stand before the verb."""


@app.command()
def download(
    phase: Annotated[str, typer.Option(help="Phases: 1,2 or 3-5 or all.")],
    dest: Annotated[Path, typer.Option(help="Folder that gets phase1 ... phase5.")],
    source: Annotated[str, typer.Option(help="hf or modelscope.")] = "hf",
    endpoint: Annotated[
        str | None, typer.Option(help="Address of the hub or a mirror; else HF_ENDPOINT.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit, branch or tag; the newest by default.")
    ] = None,
    repo: Annotated[
        str | None, typer.Option(help="Dataset, owner/name; Kaiyuan-2B's by default.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host to which the endpoint may send us on.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Files at a time.")] = 8,
    recheck: Annotated[
        bool, typer.Option("--recheck", help="Read and hash every file again.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would come, and the disk.")
    ] = False,
) -> None:
    """Download phases of the pre-training data, resumable and checksum-verified.

    A token is taken from the environment (HF_TOKEN, MODELSCOPE_API_TOKEN) and from nowhere else.

    Example: kaiyuan download --phase 1,2 --dest data --dry-run
    """
    from kaiyuan.data import download as verb
    from kaiyuan.data.phases import parse_phases

    job = verb.Job(
        phases=parse_phases(phase),
        dest=dest,
        source=source,
        endpoint=endpoint,
        revision=revision,
        repo=repo or verb.REPO,
        more_hosts=tuple(host.lower() for host in allow_host or ()),
        workers=workers,
        recheck=recheck,
    )
    lines = verb.preview(job) if dry_run else verb.describe(verb.download(job))
    typer.echo("\n".join(lines))


@app.command()
def inspect(
    paths: Annotated[list[str], typer.Argument(help="Files, folders, globs or hf:// addresses.")],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json, to count tokens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with histograms.")] = None,
    sample: Annotated[int, typer.Option(min=1, help="Rows of text to look at, about.")] = 2000,
) -> None:
    """Show what parquet files hold, what is wrong with them, and what convert will do.

    Example: kaiyuan inspect data/phase1 --html phase1.html
    """
    from rich.console import Console

    from kaiyuan.data import inspect as verb
    from kaiyuan.data.inspect_page import show, write_html

    report = verb.inspect(paths, tokenizer, sample)
    if as_json:
        typer.echo(json.dumps(report.to_json(), ensure_ascii=False, indent=1))
    else:
        show(report, Console())
    if html:
        write_html(report, html)
    if report.faults:
        raise UserError(
            f"{len(report.faults)} of {len(report.files)} files cannot be read, "
            f"such as {report.faults[0].name}"
        )


@app.command()
def convert(
    input: Annotated[list[Path], typer.Option(help="Parquet file, folder or glob; repeatable.")],
    output: Annotated[Path, typer.Option(help="New or empty folder, or one to go on with.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder with the tokenizer's four files.")],
    order: Annotated[
        Literal["rank", "rank-desc", "file"] | None,
        typer.Option(help="Training order: by rank (lowest or highest first) or as in the files."),
    ] = None,
    eod: Annotated[str, typer.Option(help="Token that ends each document.")] = "<|endoftext|>",
    encoder: Annotated[
        Literal["fast", "hf"], typer.Option(help="fastokens where it gives the same ids, or hf.")
    ] = "fast",
    special_text: Annotated[
        Literal["parse", "literal"],
        typer.Option(help="Text that spells a special token: its id (as in HF), or plain text."),
    ] = "parse",
    text_column: Annotated[str, typer.Option(help="Name of the text.")] = "text",
    rank_column: Annotated[str, typer.Option(help="Name of the rank.")] = "rank",
    workers: Annotated[int | None, typer.Option(min=1, help="Default: one a core.")] = None,
    executor: Annotated[Literal["local", "ray"], typer.Option(help="Where to run.")] = "local",
    single: Annotated[
        bool, typer.Option("--single", help="Also write one file pair in training order.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Convert parquet to Megatron's .bin/.idx, in exact order; go on where a killed run was.

    Example: kaiyuan convert --input data/phase3 --output out/phase3 --tokenizer tok --order rank
    """
    from kaiyuan.data.convert import plan_conversion, run_conversion
    from kaiyuan.data.progress import describe_manifest, describe_plan

    plan = plan_conversion(
        input,
        output,
        tokenizer,
        order=order,
        eod=eod,
        encoder=encoder,
        special_text=special_text,
        text_column=text_column,
        rank_column=rank_column,
    )
    if dry_run:
        summary = plan.summary(single)
        typer.echo(json.dumps(summary, indent=1) if as_json else describe_plan(summary))
        return
    manifest = run_conversion(plan, workers=workers, executor=executor, single=single)
    text = {key: manifest[key] for key in ("counts", "order", "dtype", "eod", "encoder")}
    typer.echo(json.dumps(text, indent=1) if as_json else describe_manifest(output, manifest))


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What convert wrote.")],
    against: Annotated[
        list[Path] | None, typer.Option(help="Parquet to compare a sample with; repeatable.")
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Needed with --against.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check every byte of a converted phase, and a sample of it against the parquet.

    Example: kaiyuan verify out/phase3 --against data/phase3 --tokenizer tok
    """
    from kaiyuan.data.verify import verify as check
    from kaiyuan.data.verify import verify_against

    if against and tokenizer is None:
        raise UserError("--against needs --tokenizer, the folder that convert was given")
    report = {"checked": check(folder)}
    if against and tokenizer is not None:
        report["compared"] = verify_against(folder, against, tokenizer)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    for what, counts in report.items():
        typer.echo(f"{what}: " + ", ".join(f"{n:,} {name}" for name, n in counts.items()))
    typer.echo(f"{folder} is whole")


@app.command()
def tokenizer(
    source: Annotated[str, typer.Argument(metavar="FROM", help="Model folder or hub id.")],
    output: Annotated[Path, typer.Option(help="Folder to write the four files to.")],
) -> None:
    """Take the four tokenizer files out of a model and check that they agree.

    Example: kaiyuan tokenizer Qwen/Qwen3-1.7B --output tok
    """
    from kaiyuan.data.tokenizer import extract_tokenizer

    info = extract_tokenizer(source, output)
    typer.echo(f"{output}: vocabulary of {info.vocab_size:,}, hash {info.hash[:16]}")


@app.command()
def corpus(output: Annotated[Path, typer.Option(help="Folder to make.")]) -> None:
    """Make a small corpus, laid out as the published data is, from text that Python ships.

    Example: kaiyuan corpus --output toy/corpus
    """
    from kaiyuan.data.corpus import make_corpus

    for phase in make_corpus(output)["phases"]:
        typer.echo(
            f"{output / phase['name']}: {phase['rows']:,} rows ({phase['null']} null, "
            f"{phase['empty']} empty), {phase['text_bytes'] / 1e6:.2f} MB of text"
        )


@app.command("train-tokenizer")
def train_tokenizer(
    input: Annotated[Path, typer.Option(help="Parquet file, folder or glob.")],
    output: Annotated[Path, typer.Option(help="Folder to write the four files to.")],
    vocab_size: Annotated[int, typer.Option(help="Entries of the vocabulary.")] = 8192,
) -> None:
    """Train a byte-level BPE tokenizer; a reproduction takes the published one instead.

    Example: kaiyuan train-tokenizer --input toy/corpus --output toy/tokenizer
    """
    from kaiyuan.data.corpus import texts_of
    from kaiyuan.data.tokenizer import train_tokenizer

    info = train_tokenizer(texts_of(input), output, vocab_size)
    typer.echo(f"{output}: vocabulary of {info.vocab_size:,}, hash {info.hash[:16]}")


DataFolder = Annotated[
    Path | None, typer.Option(help="Folder with the converted phases, phase1 to phase5.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Megatron arguments to change: lr=1e-3, or phase5.min_lr=1e-4 for one phase.",
    ),
]


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="toy, gpt_smoke, qwen3_1p7b, or a params folder.")],
    changes: Overrides = None,
    data: DataFolder = None,
    gpus: Annotated[int, typer.Option(min=1, help="Number of all GPUs.")] = 1,
    tflops: Annotated[
        float | None, typer.Option(min=0.001, help="Expected of each GPU, in TFLOP/s.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a training will do and need; no GPU, torch or data is needed.

    Example: kaiyuan plan qwen3_1p7b --gpus 64 micro_batch_size=8
    """
    from rich.console import Console

    from kaiyuan.config import load_params
    from kaiyuan.plan import make_plan
    from kaiyuan.plan_summary import DEFAULT_TFLOPS, plan_summary, plan_text

    planned = make_plan(load_params(model, changes or []), data)
    summary = plan_summary(planned, gpus, tflops or DEFAULT_TFLOPS)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
    else:
        console = Console(soft_wrap=True)
        console.width = max(console.width, 100)
        console.print(plan_text(summary, planned))


@app.command()
def train(
    model: Annotated[str, typer.Argument(help="toy, gpt_smoke, qwen3_1p7b, or a params folder.")],
    data: Annotated[Path, typer.Option(help="Folder with the converted phases.")],
    output: Annotated[Path, typer.Option(help="Folder of the run; gone on with if it exists.")],
    changes: Overrides = None,
    phase: Annotated[str | None, typer.Option(help="Train this phase only.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Held against the data's, and noted for export.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Processes here; default: one a GPU, or 1.")
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Number of this machine.")] = 0,
    master: Annotated[str, typer.Option(help="HOST:PORT of machine 0, if several.")] = "",
    verify_data: Annotated[
        bool, typer.Option("--verify-data", help="Compare all data with its hashes first.")
    ] = False,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Go on though the plan was changed.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Check everything and end.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands and end.")] = False,
) -> bool | None:
    """Train all phases, or one; the same command goes on with an interrupted run.

    Example: kaiyuan train toy --data toy/data --output toy/run lr=2e-3
    """
    import shlex

    from kaiyuan.config import load_params
    from kaiyuan.plan import make_plan
    from kaiyuan.preflight import gpu_count, preflight
    from kaiyuan.train import Nodes, check_layout, phase_arguments, train

    params = load_params(model, changes or [])
    nodes = Nodes(nproc or gpu_count() or 1, nnodes, node_rank, master)
    if dry_run:
        plan = make_plan(params, data)
        check_layout(plan, nodes)
        for each in plan.phases:
            typer.echo(shlex.join([*nodes.command(), *phase_arguments(each, data, output)]))
        return None
    plan = preflight(params, data, output, nodes, tokenizer, phase, verify_data)
    if check:
        typer.echo(f"ready to train {plan.params.name}: {plan.steps:,} steps in all")
        return None
    return train(plan, data, output, nodes, tokenizer, phase, allow_change=allow_change)


Checkpoint = Annotated[
    Path, typer.Argument(help="A run, its checkpoints folder, or one iteration's folder.")
]


@app.command("export")
def export_checkpoint(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Option(help="Folder to make.")],
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
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
    output: Annotated[Path, typer.Option(help="Folder to make, for --load of a training.")],
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
    output: Annotated[Path, typer.Option(help="Folder to make.")],
    last: Annotated[int | None, typer.Option(help="So many of the newest.")] = None,
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
        str | None, typer.Option(help="File with a prompt a line; - is the standard input.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="At most so many tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(help="So many prompts at once.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    model: ModelFile = None,
    vocab_size: VocabSize = None,
    tokenizer: TokenizerFolder = None,
) -> None:
    """Continue texts. A checkpoint is exported beside itself first, and that is kept.

    Example: kaiyuan generate toy/run --prompt "def main(" --max-new-tokens 32
    """
    from kaiyuan.generate import Sampling, generate, model_folder

    prompts = [*(prompt or []), *_prompt_lines(prompt_file)]
    folder, _ = model_folder(checkpoint, model, vocab_size, tokenizer)
    streamed = len(prompts) == 1 and not as_json
    if streamed:
        typer.echo(prompts[0], nl=False)
    texts = generate(
        folder,
        prompts,
        Sampling(max_new_tokens, temperature, top_p, seed),
        batch_size,
        on_text=(lambda text: print(text, end="", flush=True)) if streamed else None,
    )
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

    Example: kaiyuan compare toy/run toy/model
    """
    from tokenizers import Tokenizer

    from kaiyuan.checkpoint.describe import describe_checkpoint
    from kaiyuan.checkpoint.parity import compare_logits

    ids = Tokenizer.from_file(str(exported / "tokenizer.json")).encode(text).ids
    difference = compare_logits(describe_checkpoint(checkpoint), exported, [ids])
    typer.echo(f"largest difference of the logits of {len(ids)} tokens: {difference:.2e}")
    return difference


app.command()(cli_models.evaluate)
app.command()(cli_models.validate)
app.command()(cli_models.serve)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
) -> None:
    """Show the phases of a run as a table and draw its loss curve.

    Example: kaiyuan report toy/run
    """
    from rich.console import Console

    from kaiyuan.report import draw_losses, phase_table

    Console().print(phase_table(run))
    picture = run / "loss.png"
    draw_losses(run, picture)
    typer.echo(f"loss curve: {picture}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything that is made.")] = Path("toy"),
) -> None:
    """Run the whole chain, from parquet to a talking model, on a toy; no GPU is needed.

    Example: kaiyuan demo --out toy
    """
    from rich.console import Console

    from kaiyuan.demo import run_demo

    run_demo(out, lambda argv: app(list(argv), standalone_mode=False), Console())


def _prompt_lines(file: str | None) -> list[str]:
    if file is None:
        return []
    if file == "-":
        return sys.stdin.read().splitlines()
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error


def main() -> None:
    """Run the command line; what a user can mend becomes one line and exit code 2."""
    try:
        app()
    except (UserError, OSError) as error:
        if "--debug" in sys.argv[1:]:
            raise
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            # A file that cannot be read or written, where no better sentence was found for it.
            text = f"{error.filename}: {error.strerror}"
        typer.secho(f"kaiyuan: {text}", fg=typer.colors.RED, err=True)
        sys.exit(2)
