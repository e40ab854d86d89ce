"""The command line: one thin function a verb, in a module for each part of the work.

Verbs import what they need when they run, so that ``kaiyuan --help`` stays instant.
"""

import sys
from typing import Annotated, Any

import typer

from kaiyuan import __version__
from kaiyuan.cli import data, models, profiling, training
from kaiyuan.errors import UserError

app = typer.Typer(
    name="kaiyuan",
    help="Reproduce the pre-training of Kaiyuan-2B on Megatron, from parquet to a talking model.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
for part in (data, training, profiling, models):
    app.add_typer(part.app)


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


def main() -> None:
    """Run the command line; what a user can mend becomes one line and exit code 2."""
    if not sys.argv[1:]:
        sys.argv.append("--help")
    try:
        code = app(standalone_mode=False)
        # What a verb returns is for those who call it as a function.
        sys.exit(code if type(code) is int else 0)
    except (UserError, OSError) as error:
        if "--debug" in sys.argv[1:]:
            raise
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            # A file that cannot be read or written, where no better sentence was found for it.
            text = f"{error.filename}: {error.strerror}"
    except Exception as error:
        # Click's, which Typer has within itself or beside it, by its version.
        if not hasattr(error, "format_message"):
            raise
        text = _mistake(error)
    typer.secho(f"kaiyuan: {text}", fg=typer.colors.RED, err=True)
    sys.exit(2)


def _mistake(error: Any) -> str:
    """Return the one line for a verb, an option or a value that the command line does not take."""
    text = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    context = getattr(error, "ctx", None)
    verb = f" {context.info_name}" if context and context.parent else ""
    return f"{text[:1].lower()}{text[1:]}; see kaiyuan{verb} --help"
