"""Params: what a model is (model.yaml), how it is trained (hparams.yaml), on what (data.yaml).

The keys of model.yaml and hparams.yaml are Megatron's own argument names with underscores:
``num_layers: 28`` becomes ``--num-layers 28``, ``swiglu: true`` becomes ``--swiglu``, and
``false`` or ``null`` leaves the argument out. hparams.yaml may hold a mapping ``phases`` with the
arguments that differ in a phase. data.yaml lists the phases:

    phases:
      phase1:
        order: file        # or rank, rank-desc: the order that the converted data must have
        tokens: 100000000  # assumed by ``kaiyuan plan`` until the data is converted
        max_samples: 200   # stop the phase early; left out for a whole pass
"""

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from kaiyuan.accepted import ACCEPTED, DERIVED, MODEL
from kaiyuan.errors import UserError
from kaiyuan.values import check_values, is_whole

# What kaiyuan/megatron is made for; pyproject.toml pins it.
MEGATRON_VERSIONS = ("0.19.2",)
# The arguments that kaiyuan/rank.py takes beside Megatron's: type and meaning.
OWN_ARGUMENTS: dict[str, tuple[type, str]] = {
    "phase_name": (str, "Name of the phase, for the records."),
    "record_to": (str, "CSV file that gets one line an iteration."),
    "max_loss_jump": (float, "Stop where the loss is so many nats above its recent median."),
    "measure_to": (str, "JSON file that gets times and memory; the training then ends."),
    "measure_seconds": (float, "So long, after the warm-up."),
    "sandwich_norm": (bool, "Normalise the outputs of attention and MLP before they are added."),
    "output_logit_cap": (float, "Cap the output logits: cap * tanh(logits / cap)."),
}
_OWN_FLAGS = [name for name, (kind, _) in OWN_ARGUMENTS.items() if kind is bool]
ORDERS = ("file", "rank", "rank-desc")
_PHASE_KEYS = ("order", "tokens", "max_samples")
_ROOT = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class PhaseParams:
    """One phase of the curriculum.

    Attributes:
        name: also the name of the folder of its converted data.
        order: "file", "rank" or "rank-desc".
        tokens: number assumed where there is no converted data yet.
        max_samples: upper bound of the samples trained on, None for all.
        hparams: Megatron arguments that differ from the common ones.
    """

    name: str
    order: str
    tokens: int | None
    max_samples: int | None
    hparams: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Params:
    """A model and its training, as the three files say, with overrides applied."""

    name: str
    model: dict[str, Any]
    hparams: dict[str, Any]
    phases: tuple[PhaseParams, ...]

    def arguments(self, phase: PhaseParams) -> dict[str, Any]:
        """Return the Megatron arguments of a phase, before what the plan derives."""
        return {**self.model, **self.hparams, **phase.hparams}


def params_folder(model: str) -> Path:
    """Return the folder of a model's params: a path, or the name of one that is shipped.

    Raises:
        UserError: there is no such model; the message lists those that there are.
    """
    # In a checkout the params lie under scripts/, as the reference has them; in a wheel beside
    # this file.
    roots = (_ROOT / "params", _ROOT.parent / "scripts" / "kaiyuan2b-training" / "params")
    shipped = {p.name: p for root in roots if root.is_dir() for p in root.iterdir() if p.is_dir()}
    # A name comes before a folder: a run's output may well be called as its model is.
    if model in shipped:
        return shipped[model]
    if not Path(model).is_dir():
        raise UserError(
            f"there is no model {model!r}: it must be one of {', '.join(sorted(shipped))} "
            "or a folder with model.yaml, hparams.yaml and data.yaml"
        )
    return Path(model)


def load_params(model: str, overrides: Sequence[str] = (), overlay: Path | None = None) -> Params:
    """Read a model's three files and apply overrides.

    Args:
        model: a shipped model's name, or a folder.
        overrides: ``KEY=VALUE`` for every phase or ``PHASE.KEY=VALUE`` for one; KEY is a Megatron
            argument name, or one of a phase's keys in data.yaml.
        overlay: YAML file with such keys and values, applied before the overrides.

    Raises:
        UserError: a file is missing or not as it should be, or a name is not known.
    """
    folder = params_folder(model)
    model_args = _read(folder / "model.yaml")
    hparams = _read(folder / "hparams.yaml")
    data = _read(folder / "data.yaml")
    phases: dict[str, dict[str, Any]] = _mapping(data.pop("phases", None), "data.yaml: phases")
    differing = _mapping(hparams.pop("phases", {}), "hparams.yaml: phases")
    if data:
        raise UserError(f"data.yaml knows only the key phases, not {next(iter(data))!r}")
    for key in model_args:
        if key in hparams:
            raise UserError(f"{key} stands in model.yaml and in hparams.yaml: give it once")
    for name in differing:
        if name not in phases:
            raise UserError(f"hparams.yaml speaks of {name!r}, which data.yaml does not list")
    settings = {name: {**_mapping(phases[name], name)} for name in phases}
    arguments = {name: {**_mapping(differing.get(name) or {}, name)} for name in phases}
    laid_over = _read(overlay) if overlay else {}
    for key, value in [*laid_over.items(), *map(_parse_override, overrides)]:
        _override(key, value, model_args, hparams, settings, arguments)
    for part in (model_args, hparams, *arguments.values()):
        for key in part:
            check_argument_name(key)
            if key in MODEL and part is not model_args:
                raise UserError(
                    f"{key} is part of the model, which all phases share: it belongs in model.yaml"
                )
    if any("global_batch_size" in part for part in arguments.values()):
        raise UserError("global_batch_size must be the same in all phases")
    params = Params(
        name=folder.name,
        model=model_args,
        hparams=hparams,
        phases=tuple(_phase(name, settings[name], arguments[name]) for name in settings),
    )
    for phase in params.phases:
        check_values(params.arguments(phase), phase.name)
    return params


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    return _mapping(_load(text, str(path)), path.name)


class _Loader(yaml.SafeLoader):
    """Reads 5e-3 as a number, as YAML 1.2 does (YAML 1.1 wants 5.0e-3), and each key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        names = [self.construct_object(key, deep) for key in own]
        for i, name in enumerate(names):
            if name in names[:i]:
                mark = own[i].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"{name} stands twice", mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _load(text: str, what: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{what} is not valid YAML: {' '.join(str(error).split())}") from error


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{what} must be a mapping of names to values")
    return value


def _parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise UserError(f"{override!r} is not of the form KEY=VALUE")
    return key, _load(text, f"the value of {key}")


def _override(
    key: str,
    value: Any,
    model: dict[str, Any],
    hparams: dict[str, Any],
    settings: Mapping[str, dict[str, Any]],
    arguments: Mapping[str, dict[str, Any]],
) -> None:
    phase, dot, name = key.strip().replace("-", "_").rpartition(".")
    if not name:
        raise UserError(f"{key!r} is no name of an argument")
    if dot and phase not in settings:
        raise UserError(f"there is no phase {phase!r}; there are {', '.join(settings)}")
    for each in [phase] if dot else settings:
        if name in _PHASE_KEYS:
            settings[each][name] = value
        elif dot or name in arguments[each]:
            arguments[each][name] = value
    if not dot and name not in _PHASE_KEYS:
        (model if name in model or name in MODEL else hparams)[name] = value


def _phase(name: str, settings: dict[str, Any], hparams: dict[str, Any]) -> PhaseParams:
    for key in settings:
        if key not in _PHASE_KEYS:
            raise UserError(
                f"data.yaml: {name} has an unknown key {key!r}{_nearest(key, _PHASE_KEYS)}"
            )
    order = settings.get("order", "file")
    if order not in ORDERS:
        raise UserError(f"data.yaml: the order of {name} must be one of {', '.join(ORDERS)}")
    for key in ("tokens", "max_samples"):
        value = settings.get(key)
        if value is not None and not (is_whole(value) and value >= 1):
            raise UserError(f"data.yaml: {key} of {name} must be a positive whole number")
    return PhaseParams(
        name=name,
        order=order,
        tokens=settings.get("tokens"),
        max_samples=settings.get("max_samples"),
        hparams=hparams,
    )


@functools.cache
def argument_names() -> dict[str, str]:
    """Return Megatron's option names, each with "flag" or "value".

    They are kept in a file, so that a mistake in a name is found without loading Megatron; a test
    holds the file against Megatron's parser.
    """
    text = resources.files("kaiyuan").joinpath("megatron_arguments.txt").read_text()
    return dict(line.split() for line in text.splitlines())


def option(key: str) -> str:
    """Return the option of a params key: ``num_layers`` gives ``--num-layers``."""
    return "--" + key.replace("_", "-")


def check_argument_name(key: str) -> None:
    """Check that an argument may be given.

    Raises:
        UserError: Megatron has none of that name (the message has the nearest), the launcher sets
            it, or it asks for what we do not have.
    """
    known = [name[2:].replace("-", "_") for name in argument_names()] + list(OWN_ARGUMENTS)
    if key not in known:
        raise UserError(f"Megatron has no argument {key!r}{_nearest(key, known)}")
    if key in DERIVED:
        raise UserError(f"{key} is set by kaiyuan itself and cannot be given")
    if key not in ACCEPTED:
        raise UserError(
            f"{key} is an argument of Megatron that kaiyuan does not take: its layers, data, plan "
            "or checkpoints would not follow it"
        )


def _nearest(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def to_argv(arguments: Mapping[str, Any]) -> list[str]:
    """Return a command line for Megatron's parser.

    Raises:
        UserError: a flag has a value, or an argument that needs one has none.
    """
    argv: list[str] = []
    for key, value in arguments.items():
        name = option(key)
        if value is None or value is False:
            continue
        is_flag = argument_names().get(name) == "flag" or key in _OWN_FLAGS
        if is_flag != (value is True):
            needs = "true or false" if is_flag else "a value"
            raise UserError(f"the argument {key} takes {needs}, not {value!r}")
        if value is True:
            argv.append(name)
        elif isinstance(value, list):
            argv += [name, *map(str, value)]
        else:
            argv += [name, str(value)]
    return argv
