"""The command line: one thin function a verb.

Verbs import what they need when they run, so that ``kaiyuan --help`` stays instant.
"""

import sys
from pathlib import Path
from typing import Annotated

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
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a page with histograms.")] = None,
    sample: Annotated[int, typer.Option(min=1, help="Rows of text to look at, about.")] = 2000,
) -> None:
    """Show what parquet files hold, what is wrong with them, and what convert will do.

    Example: kaiyuan inspect data/phase1 --html phase1.html
    """
    from json import dumps

    from rich.console import Console

    from kaiyuan.data import inspect as verb
    from kaiyuan.data.inspect_page import show, write_html

    report = verb.inspect(paths, tokenizer, sample)
    if json:
        typer.echo(dumps(report.to_json(), ensure_ascii=False, indent=1))
    else:
        show(report, Console())
    if html:
        write_html(report, html)
    if report.faults:
        raise UserError(
            f"{len(report.faults)} of {len(report.files)} files cannot be read, "
            f"such as {report.faults[0].name}"
        )


def main() -> None:
    """Run the command line; a UserError becomes one line and exit code 2."""
    try:
        app()
    except UserError as error:
        if "--debug" in sys.argv[1:]:
            raise
        typer.secho(f"kaiyuan: {error}", fg=typer.colors.RED, err=True)
        sys.exit(2)
