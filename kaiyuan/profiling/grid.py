"""The configurations of a sweep: which settings go with which, and which are worth a run."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from kaiyuan.config import Params, check_argument_name
from kaiyuan.errors import UserError
from kaiyuan.plan_summary import batch_layout
from kaiyuan.values import check_values

# Settings that belong together have one name in a grid, the key of this table.
_NO_RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
}
GROUPS: dict[str, dict[Any, dict[str, Any]]] = {
    "recompute": {
        "none": _NO_RECOMPUTE,
        "mlp": {
            **_NO_RECOMPUTE,
            "recompute_granularity": "selective",
            "recompute_modules": ["mlp"],
        },
        "full": {
            **_NO_RECOMPUTE,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    },
    "overlap": {
        True: {"overlap_grad_reduce": True, "overlap_param_gather": True},
        False: {"overlap_grad_reduce": False, "overlap_param_gather": False},
    },
}
Grid = dict[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One configuration.

    Attributes:
        settings: what the grid chose, by the names in the grid.
        changes: Megatron's arguments that differ from the params'.
        arguments: Megatron's, of the params' first phase, with the changes.
        data_parallel: number of data-parallel ranks.
    """

    settings: dict[str, Any]
    changes: dict[str, Any]
    arguments: dict[str, Any]
    data_parallel: int

    @property
    def name(self) -> str:
        """Return the settings in short, as a folder's name."""
        short = {
            "micro_batch_size": "mb",
            "tensor_model_parallel_size": "tp",
            "pipeline_model_parallel_size": "pp",
        }
        return "-".join(f"{short.get(k, k)}={v}" for k, v in self.settings.items())

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of a step of one rank, at the real global batch."""
        a = self.arguments
        return int(a["global_batch_size"] // (a["micro_batch_size"] * self.data_parallel))


def default_grid(arguments: Mapping[str, Any], processes: int) -> Grid:
    """Return a grid that suits a model and a number of GPUs."""
    grid: Grid = {"micro_batch_size": [1, 2, 4, 8], "recompute": ["none", "mlp", "full"]}
    if processes > 1:
        grid["recompute"].remove("full")
        groups = arguments.get("num_query_groups") or arguments["num_attention_heads"]
        sizes = [n for n in (1, 2, 4, 8) if processes % n == 0]
        grid["tensor_model_parallel_size"] = [n for n in sizes if groups % n == 0]
        layers = arguments["num_layers"]
        grid["pipeline_model_parallel_size"] = [n for n in sizes if layers % n == 0]
        grid["overlap"] = [True, False]
    return grid


def read_grid(texts: Sequence[str]) -> Grid:
    """Return the grid that options give: YAML files, or ``KEY=[VALUE, ...]``.

    Raises:
        UserError: a file or value is not as it should be, or a name is not known.
    """
    grid: Grid = {}
    for text in texts:
        key, equals, value = text.partition("=")
        source = value if equals else _text(Path(text))
        try:
            read = yaml.safe_load(source)
        except yaml.YAMLError as error:
            raise UserError(f"{text!r} is not valid YAML: {' '.join(str(error).split())}") from None
        part = {key.strip(): read} if equals else read
        if not isinstance(part, dict) or not all(isinstance(name, str) for name in part):
            raise UserError(f"{text} must be a mapping of names to lists of values")
        grid |= {name: x if isinstance(x, list) else [x] for name, x in part.items()}
    for name, values in grid.items():
        if not values:
            raise UserError(f"{name} has no values in the grid")
        if name not in GROUPS:
            check_argument_name(name)
        elif unknown := [value for value in values if value not in list(GROUPS[name])]:
            known = ", ".join(map(str, GROUPS[name]))
            raise UserError(f"{name} takes {known} in a grid, not {unknown[0]!r}")
    return grid


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a grid: {error}") from error


def candidates(params: Params, grid: Grid, processes: int) -> list[Candidate]:
    """Return the configurations of a grid that may be given and divide among the processes.

    Raises:
        UserError: none does; the message has what is wrong with the first.
    """
    errors: list[str] = []
    found = list(_candidates(params, grid, processes, errors))
    if not found:
        reason = errors[0] if errors else "there is nothing to overlap on one data-parallel rank"
        raise UserError(f"no configuration of the grid can be run: {reason}")
    return found


def _candidates(
    params: Params, grid: Grid, processes: int, errors: list[str]
) -> Iterator[Candidate]:
    base = params.arguments(params.phases[0])
    seen: list[dict[str, Any]] = []
    for values in itertools.product(*grid.values()):
        settings = dict(zip(grid, values, strict=True))
        changes: dict[str, Any] = {}
        for name, value in settings.items():
            changes |= GROUPS[name][value] if name in GROUPS else {name: value}
        try:
            check_values(base | changes, "the grid")
            if changes.get("tensor_model_parallel_size", 1) > 1:
                changes.setdefault("sequence_parallel", True)
            # What the params say already, or do not say at all, is no change.
            changes = {
                k: v for k, v in changes.items() if v != base.get(k) and not _off(base, k, v)
            }
            arguments = base | changes
            layout = batch_layout(arguments, processes)
        except UserError as error:
            errors.append(str(error))
            continue
        if layout["data parallel"] == 1 and settings.get("overlap") is False:
            continue  # there is nothing to overlap
        if changes not in seen:
            seen.append(changes)
            yield Candidate(settings, changes, arguments, layout["data parallel"])


def _off(base: Mapping[str, Any], key: str, value: Any) -> bool:
    default = 1 if key.endswith("parallel_size") else None
    return base.get(key) in (None, False) and (value in (None, default) or value is False)
