"""The plan of a training: phases, samples, steps, learning rate and Megatron's arguments.

Everything here is arithmetic on the params and on the manifests of the converted data; neither
torch nor Megatron is needed.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from kaiyuan.config import Params, PhaseParams, to_argv
from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.errors import UserError
from kaiyuan.files import MANIFEST


@dataclasses.dataclass(frozen=True)
class PhasePlan:
    """One phase, planned.

    Attributes:
        name: of the phase.
        data: the converted data; None where the tokens are assumed.
        tokens: of the phase's data, end-of-document tokens included.
        samples: trained on; a multiple of the global batch.
        first_step: steps done before the phase begins.
        last_step: steps done when it ends.
        arguments: Megatron's, by name.
    """

    name: str
    data: ConvertedPhase | None
    tokens: int
    samples: int
    first_step: int
    last_step: int
    arguments: dict[str, Any]

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of the phase."""
        return self.last_step - self.first_step

    @property
    def argv(self) -> list[str]:
        """Return the command line for Megatron's parser."""
        return to_argv(self.arguments)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, as Megatron's scheduler gives it.

        Args:
            step: 0 for the first of the whole training. Step k is taken with the rate of k
                finished steps, so that a warm-up begins with a rate of 0.
        """
        a = self.arguments
        done = step * a["global_batch_size"]
        peak, end = float(a["lr"]), float(a.get("min_lr") or 0)
        warmup = a.get("lr_warmup_samples") or 0
        if warmup and done <= warmup:
            return peak * done / warmup
        style = a.get("lr_decay_style", "linear")
        if style == "constant":
            return peak
        if done > a["lr_decay_samples"]:
            return end
        if style == "inverse-square-root":
            return max(end, peak * math.sqrt(max(warmup, 1) / max(done, 1)))
        if style == "WSD":
            length = a["lr_wsd_decay_samples"]
            ratio = max(0.0, (done - (a["lr_decay_samples"] - length)) / length)
            style = a.get("lr_wsd_decay_style", "exponential")
        else:
            ratio = (done - warmup) / (a["lr_decay_samples"] - warmup)
        return end + (peak - end) * _DECAY[style](ratio)


# Share of the decay that is still to come, at a given share of its length (Megatron's
# OptimizerParamScheduler).
_DECAY = {
    "linear": lambda r: 1 - r,
    "cosine": lambda r: (1 + math.cos(math.pi * r)) / 2,
    "exponential": lambda r: 2 * 0.5**r - 1,
    "minus_sqrt": lambda r: 1 - math.sqrt(r),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A training, planned."""

    params: Params
    phases: tuple[PhasePlan, ...]

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps of all phases."""
        return self.phases[-1].last_step

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, 0 being the first."""
        for phase in self.phases:
            if step < phase.last_step:
                return phase.learning_rate(step)
        raise ValueError(f"there are only {self.steps} steps")


def make_plan(params: Params, data: Path | None = None) -> Plan:
    """Plan a training.

    Args:
        params: of the model.
        data: folder with the converted phases, each in a folder of the phase's name; there must
            be one at least. Without a folder, or for a phase that is not converted yet, the
            tokens that data.yaml assumes are taken.

    Raises:
        UserError: ``data`` is no folder or has no phase; a phase has neither data nor an
            assumption, is too short for one step, or was converted in another order than
            data.yaml asks for.
    """
    if data is not None and not data.is_dir():
        raise UserError(f"{data} is not a folder: name the one with the converted phases")
    converted = [converted_phase(phase, params, data) for phase in params.phases]
    if data is not None and not any(converted):
        names = ", ".join(phase.name for phase in params.phases)
        raise UserError(
            f"{data} has none of the converted phases {names}: name the folder in which "
            "kaiyuan convert made them, each in a folder of its name"
        )
    tokens = [_tokens(*pair) for pair in zip(params.phases, converted, strict=True)]
    batch, sequence = (_number(params, key) for key in ("global_batch_size", "seq_length"))
    ends = [0]
    for phase, count in zip(params.phases, tokens, strict=True):
        samples = (count - 1) // sequence
        if phase.max_samples is not None:
            samples = min(samples, phase.max_samples)
        if samples < batch:
            raise UserError(
                f"{phase.name} has {samples} samples of {sequence} tokens, fewer than one global "
                f"batch of {batch}"
            )
        ends.append(ends[-1] + samples // batch)
    phases = [
        PhasePlan(
            name=phase.name,
            data=converted[i],
            tokens=tokens[i],
            samples=(ends[i + 1] - ends[i]) * batch,
            first_step=ends[i],
            last_step=ends[i + 1],
            arguments=_arguments(params, phase, ends[1:], i),
        )
        for i, phase in enumerate(params.phases)
    ]
    return Plan(params, tuple(phases))


def _arguments(params: Params, phase: PhaseParams, ends: list[int], i: int) -> dict[str, Any]:
    """Return Megatron's arguments of phase ``i``; the phases end after the steps ``ends``."""
    arguments = params.arguments(phase)
    batch = arguments["global_batch_size"]
    arguments |= {
        "train_samples": ends[-1] * batch,
        "override_opt_param_scheduler": True,
        "phase_name": phase.name,
    }
    if len(ends) > 1:
        arguments["phase_transition_iterations"] = ",".join(map(str, ends[:-1]))
    # A decay belongs to its phase: it ends with it, and as the last part of a
    # warm-up-stable-decay schedule it also begins with it.
    style = arguments.get("lr_decay_style", "linear")
    end = ends[-1] if style == "constant" else ends[i]
    arguments.setdefault("lr_decay_samples", end * batch)
    if style == "WSD":
        steps = ends[i] - (ends[i - 1] if i else 0)
        arguments.setdefault("lr_wsd_decay_samples", steps * batch)
    warmup = arguments.get("lr_warmup_samples") or 0
    if warmup >= arguments["lr_decay_samples"]:
        raise UserError(
            f"the warm-up of {warmup} samples is not shorter than the "
            f"{arguments['lr_decay_samples']} samples that are trained on"
        )
    return arguments


def converted_phase(phase: PhaseParams, params: Params, data: Path | None) -> ConvertedPhase | None:
    """Open a phase's converted data, where there is any, and check that it fits the params.

    Raises:
        UserError: it does not fit, or files are missing or of another size.
    """
    if data is None or not (data / phase.name / MANIFEST).exists():
        return None
    converted = ConvertedPhase.open(data / phase.name)
    order = converted.manifest["order"]["kind"]
    if order != phase.order:
        raise UserError(
            f"{converted.folder} was converted in {order} order, but data.yaml asks for "
            f"{phase.order} order"
        )
    vocab_size = _number(params, "vocab_size")
    if converted.vocab_size > vocab_size:
        raise UserError(
            # of no phase by name, so that it is said once of all that have it
            f"the data in {data} was made with a vocabulary of {converted.vocab_size} entries, the "
            f"model has {vocab_size}"
        )
    return converted


def _tokens(phase: PhaseParams, converted: ConvertedPhase | None) -> int:
    if converted is not None:
        return converted.num_tokens
    if phase.tokens is None:
        raise UserError(
            f"{phase.name} is not converted yet and data.yaml assumes no number of tokens for it"
        )
    return phase.tokens


def _number(params: Params, key: str) -> int:
    value = params.model.get(key, params.hparams.get(key))
    if not isinstance(value, int):
        raise UserError(f"the params of {params.name} must give {key} as a whole number")
    return value
