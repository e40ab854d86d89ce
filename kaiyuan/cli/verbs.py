"""A part of the command line whose verbs take paths."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from kaiyuan.errors import UserError


class Verbs(typer.Typer):
    """Typer's, but an empty path is a mistake: `Path` would take it for the current folder.

    An empty name is what an unset variable of a shell gives.
    """

    def command(self, *args: Any, **options: Any) -> Callable[[Any], Any]:
        """Register a verb; its parameters that are paths, or lists of them, are watched."""
        register = super().command(*args, **options)

        def watched(verb: Any) -> Any:
            for name, hint in get_type_hints(verb, include_extras=True).items():
                if get_origin(hint) is Annotated:
                    kind, info = get_args(hint)
                    if _holds_paths(kind):
                        info.parser = _path_parser(name)
            return register(verb)

        return watched


def _holds_paths(kind: Any) -> bool:
    return kind is Path or any(map(_holds_paths, get_args(kind)))


def _path_parser(name: str) -> Callable[[Any], Path]:
    def path(text: Any) -> Path:
        if text == "":
            raise UserError(
                f"the path given for {name} is empty: name one, or . for the current folder"
            )
        return Path(text)

    return path
