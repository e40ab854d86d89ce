"""The command line: one thin function a verb.

Verbs import what they need when they run, so that ``kaiyuan --help`` stays instant.
"""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from kaiyuan import __version__
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


def main() -> None:
    """Run the command line; a UserError becomes one line and exit code 2."""
    try:
        app()
    except UserError as error:
        if "--debug" in sys.argv[1:]:
            raise
        typer.secho(f"kaiyuan: {error}", fg=typer.colors.RED, err=True)
        sys.exit(2)
