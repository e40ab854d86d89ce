"""A part of the command line whose verbs take paths."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from kaiyuan.errors import UserError


class PathOrName(str):
    """A path, or the name of something that is no file: a repository, a model's params."""


class Verbs(typer.Typer):
    """Typer's, but an empty path is a mistake: it would be taken for the current folder.

    An empty one is what an unset variable of a shell gives.
    """

    def command(self, *args: Any, **options: Any) -> Callable[[Any], Any]:
        """Register a verb; its parameters that hold paths are watched."""
        register = super().command(*args, **options)

        def watched(verb: Any) -> Any:
            for name, hint in get_type_hints(verb, include_extras=True).items():
                if get_origin(hint) is Annotated:
                    kind, info = get_args(hint)
                    for place in (Path, PathOrName):
                        if _holds(kind, place):
                            info.parser = _parser(name, place)
            return register(verb)

        return watched


def _holds(kind: Any, place: type) -> bool:
    return kind is place or any(_holds(part, place) for part in get_args(kind))


def _parser(name: str, place: type) -> Callable[[Any], Any]:
    def path(text: Any) -> Any:
        if text == "":
            raise UserError(
                f"the path given for {name} is empty: name one, or . for the current folder"
            )
        return place(text)

    return path
