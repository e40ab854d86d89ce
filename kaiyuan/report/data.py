"""Where a run is in its data: rank and length of the documents over the steps."""

import dataclasses
from pathlib import Path

import numpy as np

from kaiyuan.data.ends import document_ends, ends_path
from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.errors import UserError
from kaiyuan.plan import PhasePlan
from kaiyuan.report.run import Array, Run

# Places of a phase that are looked at; each is a few reads of files.
_PLACES = 160
# Of more documents the ends are only read where training left them.
_MOST_DOCUMENTS = 20_000_000


@dataclasses.dataclass(frozen=True)
class PhaseData:
    """The data of one phase.

    Attributes:
        plan: of the phase.
        manifest: of the data; None where it was not found where training read it.
        why: what stands in the way, where something does.
        steps: places along the phase, [places].
        ranks: of the document at each place; NaN where the order goes by no rank.
        lengths: mean tokens of the documents between a place and the one before; NaN at the first.
    """

    plan: PhasePlan
    manifest: dict[str, object] | None
    why: str = ""
    steps: Array = dataclasses.field(default_factory=lambda: np.empty(0, np.int64))
    ranks: Array = dataclasses.field(default_factory=lambda: np.empty(0))
    lengths: Array = dataclasses.field(default_factory=lambda: np.empty(0))


def phase_data(run: Run) -> list[PhaseData]:
    """Look at the data of the phases that have begun, where they still are."""
    places = {part.start.phase: part.start.data for part in run.parts if part.start.data}
    hashes = {phase["name"]: phase["content_hash"] for phase in run.manifest["phases"]}
    found = []
    for plan in run.phases:
        place = places.get(plan.name)
        if place is None:
            found.append(PhaseData(plan, None, "where they are was not recorded"))
            continue
        try:
            phase = ConvertedPhase.open(place)
            if phase.content_hash != hashes[plan.name]:
                raise UserError(f"{place} holds other data than it was trained on")
            found.append(_look(run, plan, phase))
        except (UserError, OSError) as error:
            found.append(PhaseData(plan, None, str(error)))
    return found


def _look(run: Run, plan: PhasePlan, phase: ConvertedPhase) -> PhaseData:
    ends = _ends(phase, run.folder)
    if ends is None:
        return PhaseData(plan, phase.manifest, "the ends of its documents are not cached")
    steps = np.unique(np.linspace(0, plan.steps, min(_PLACES, plan.steps + 1)).astype(np.int64))
    a_step = plan.arguments["global_batch_size"] * run.sequence_length
    # The last place is the last token that is trained on.
    tokens = np.minimum(steps * a_step, plan.steps * a_step - 1)
    documents = np.searchsorted(ends, tokens, side="right")
    lengths = np.full(len(steps), np.nan)
    passed = np.diff(documents)
    stream = np.diff(ends[documents])
    lengths[1:] = np.where(passed > 0, stream / np.maximum(passed, 1), np.nan)
    return PhaseData(
        plan=plan,
        manifest=phase.manifest,
        steps=plan.first_step + steps,
        ranks=_ranks(phase, documents),
        lengths=lengths,
    )


def _ends(phase: ConvertedPhase, run: Path) -> Array | None:
    cached = ends_path(phase, run / "cache")
    if cached.exists():
        return np.asarray(np.load(cached, mmap_mode="r"))
    if phase.num_documents > _MOST_DOCUMENTS:
        return None
    return np.concatenate([*document_ends(phase)])


def _ranks(phase: ConvertedPhase, places: Array) -> Array:
    order = phase.order()
    if phase.manifest["order"]["kind"] == "file":
        return np.full(len(places), np.nan)
    documents = places if order is None else order[places]
    ranks = [phase.source(int(document))[2] for document in documents]
    return np.array([np.nan if rank is None else float(rank) for rank in ranks])
