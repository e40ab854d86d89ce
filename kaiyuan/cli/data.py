"""Verbs of the data road: from the published parquet to Megatron's file pairs."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kaiyuan.cli.verbs import PathOrName, Verbs
from kaiyuan.errors import UserError

app = Verbs()


@app.command()
def download(
    phase: Annotated[str, typer.Option(help="Phases: 1,2 or 3-5 or all.")],
    dest: Annotated[Path, typer.Option(help="Folder that gets phase1 ... phase5.")],
    source: Annotated[Literal["hf", "modelscope"], typer.Option(help="Hub.")] = "hf",
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
    paths: Annotated[
        list[PathOrName], typer.Argument(help="Files, folders, globs or hf:// addresses.")
    ],
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
    from kaiyuan.pages import check_page

    if html:
        check_page(html)
    report = verb.inspect([*paths], tokenizer, sample)
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
    from kaiyuan.data import convert as verb
    from kaiyuan.data.describe import describe_manifest, describe_plan

    options: dict[str, Any] = {
        "order": order,
        "eod": eod,
        "encoder": encoder,
        "special_text": special_text,
        "text_column": text_column,
        "rank_column": rank_column,
    }
    if dry_run:
        summary = verb.plan_conversion(input, output, tokenizer, **options).summary(single)
        typer.echo(json.dumps(summary, indent=1) if as_json else describe_plan(summary))
        return
    options |= {"workers": workers, "executor": executor, "single": single}
    try:
        manifest = verb.convert(input, output, tokenizer, **options)
    except KeyboardInterrupt:
        typer.echo("convert: stopped; the same command goes on from here", err=True)
        raise
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
    source: Annotated[PathOrName, typer.Argument(metavar="FROM", help="Model folder or hub id.")],
    output: Annotated[Path, typer.Option(help="New or empty folder for the four files.")],
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
    input: Annotated[Path, typer.Option(help="Parquet file, folder or glob; its column text.")],
    output: Annotated[Path, typer.Option(help="New or empty folder for the four files.")],
    vocab_size: Annotated[
        int,
        # kaiyuan.data.tokenizer.SMALLEST, which is not imported for every verb.
        typer.Option(min=257, help="Tokens: one a byte, the end of documents, the rest is learnt."),
    ] = 8192,
) -> None:
    """Train a byte-level BPE tokenizer; a reproduction takes the published one instead.

    Example: kaiyuan train-tokenizer --input toy/corpus --output toy/tokenizer
    """
    from kaiyuan.data.inputs import texts_of
    from kaiyuan.data.tokenizer import train_tokenizer

    info = train_tokenizer(texts_of([input]), output, vocab_size)
    typer.echo(f"{output}: vocabulary of {info.vocab_size:,}, hash {info.hash[:16]}")
