"""What `kaiyuan validate` and `kaiyuan evaluate` wrote into a run, by checkpoint."""

import csv
import dataclasses
import json
import math
from pathlib import Path

from kaiyuan.errors import UserError
from kaiyuan.runfolder import CHECKPOINTS


@dataclasses.dataclass(frozen=True)
class Validation:
    """Losses on data that was kept out.

    Attributes:
        name: of the data.
        steps: of the checkpoints.
        losses: nats a token.
        bits_per_byte: the same in bits a byte of text.
    """

    name: str
    steps: list[int]
    losses: list[float]
    bits_per_byte: list[float]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores of one checkpoint.

    Attributes:
        step: of the checkpoint.
        scores: value and standard error (NaN where there is none) by task and measure; of a
            group of tasks only the group's own.
    """

    step: int
    scores: dict[str, tuple[float, float]]


def validations(run: Path) -> list[Validation]:
    """Return the curves that `kaiyuan validate` wrote into a run."""
    found = []
    for path in sorted(run.glob("validation-*.csv")):
        try:
            with path.open(newline="", encoding="utf-8") as stream:
                rows = list(csv.DictReader(stream))
            found.append(
                Validation(
                    name=path.stem.removeprefix("validation-"),
                    steps=[int(row["iteration"]) for row in rows],
                    losses=[float(row["loss"]) for row in rows],
                    bits_per_byte=[float(row["bits_per_byte"]) for row in rows],
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is not what kaiyuan validate writes: {error}") from None
    return found


def evaluations(run: Path) -> list[Evaluation]:
    """Return what `kaiyuan evaluate` wrote beside the checkpoints of a run, in their order."""
    found = []
    for path in (run / CHECKPOINTS).glob("*-eval/results.json"):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            step = int(content["iteration"])
            found.append(Evaluation(step, _scores(content["results"])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not what kaiyuan evaluate writes: {error}") from None
    return sorted(found, key=lambda evaluation: evaluation.step)


def _scores(results: dict[str, dict[str, object]]) -> dict[str, tuple[float, float]]:
    """Return the scores of lm-eval, which names a measure "acc,none" and its error "acc_stderr"."""
    scores = {}
    for task, measures in results.items():
        if str(measures.get("alias", task)).lstrip().startswith("- "):
            continue  # of a group's parts there may be hundreds
        for name, value in measures.items():
            measure, _, kind = name.partition(",")
            if not kind or measure.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = measures.get(f"{measure}_stderr,{kind}")
            label = f"{task}: {measure}" + ("" if kind == "none" else f", {kind}")
            scores[label] = (float(value), error if isinstance(error, float) else math.nan)
    return scores
