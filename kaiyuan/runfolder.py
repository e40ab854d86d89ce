"""The folder of a run: which checkpoint it goes on from, and the plan that it was begun with.

run.json       what is trained, on what, with which schedule; sealed
checkpoints/   Megatron's, one folder an iteration
loss.csv       one line a step
logs/          all that the processes printed
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kaiyuan import __version__
from kaiyuan.accepted import CHANGEABLE, SHAPE
from kaiyuan.errors import UserError
from kaiyuan.files import atomic_write, read_manifest, sha256_of_json, write_manifest
from kaiyuan.plan import PhasePlan, Plan

# A run is described before it is complete; what is complete has a manifest.json.
RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
# What a killed launcher had started holds the run until it ends by itself, some seconds later.
_LOCK_SECONDS = 20.0
TRACKER = "latest_checkpointed_iteration.txt"

# These follow from the steps of the phases, which are compared themselves.
_DERIVED = frozenset(("train_samples", "phase_transition_iterations"))


def latest_step(run: Path) -> int:
    """Return the step that Megatron will load: what its tracker file names, 0 where it is none.

    Raises:
        UserError: the tracker holds something else.
    """
    tracker = run / CHECKPOINTS / TRACKER
    try:
        text = tracker.read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return 0
    if not text.isdecimal():
        raise UserError(f"{tracker} should hold a number, not {text!r}")
    return int(text)


def settle_checkpoints(run: Path) -> list[str]:
    """Make the tracker name a complete checkpoint, and remove what cut-short saves left.

    Megatron writes the tracker in place after a save and trusts it when it loads. A process that
    is killed, or a disk that is full, can leave it empty, or leave a folder that is no checkpoint.
    Where the tracker names a complete checkpoint it is left as it is, so that going back to an
    earlier step is a matter of editing it.

    Returns:
        What was done, a sentence each.
    """
    folder = run / CHECKPOINTS
    if any(folder.glob("iter_*")) and not (run / RUN_FILE).exists():
        raise UserError(
            f"{folder} holds checkpoints, but {run} has no {RUN_FILE}: it is no run of kaiyuan's; "
            "give another folder with --output"
        )
    done = []
    steps: dict[int, Path] = {}
    for path in sorted(folder.glob("iter_*")):
        if not path.name.removeprefix("iter_").isdecimal():
            continue  # an export or an evaluation, which lie beside their checkpoint
        # Megatron writes this file when all others are on the disk.
        if (path / "metadata.json").is_file():
            steps[int(path.name.removeprefix("iter_"))] = path
        else:
            shutil.rmtree(path)
            done.append(f"removed {path.name}, whose save was cut short")
    with contextlib.suppress(UserError):
        named = latest_step(run)
        if named in steps and _is_complete(steps[named], done):
            return done
    newest = next((n for n in sorted(steps, reverse=True) if _is_complete(steps[n], done)), None)
    tracker = folder / TRACKER
    if newest is not None:
        with atomic_write(tracker, "w") as out:
            out.write(str(newest))
        done.append(f"going on from step {newest}, the last complete checkpoint")
    elif tracker.exists():
        tracker.unlink()
        done.append("there is no complete checkpoint: starting from the beginning")
    return list(dict.fromkeys(done))


def _is_complete(checkpoint: Path, problems: list[str]) -> bool:
    # Torch is loaded only for a run that has checkpoints.
    from kaiyuan.checkpoint.load import TorchDistCheckpoint

    try:
        TorchDistCheckpoint(checkpoint)
    except UserError as error:
        problems.append(str(error))
        return False
    return True


@contextlib.contextmanager
def lock(run: Path, node: int, say: Callable[[str], object] = print) -> Iterator[int]:
    """Hold the run for this process and those that it starts, which inherit the lock.

    Args:
        run: its folder, which is made.
        node: number of this machine.
        say: gets a sentence where another process holds it, for whose end is waited a while.

    Yields:
        The file descriptor to pass on.

    Raises:
        UserError: another process holds it, or the folder cannot be written to.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        handle = os.open(run / f".lock-{node}", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"cannot write to {run}: {error.strerror}") from error
    try:
        _wait_for(handle, run, say)
        yield handle
    finally:
        os.close(handle)


def _wait_for(handle: int, run: Path, say: Callable[[str], object]) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    said = False
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.monotonic() >= deadline:
            raise UserError(f"another process is training {run}")
        if not said:
            say(f"another process is training {run}: waiting {_LOCK_SECONDS:.0f} s for its end")
            said = True
        time.sleep(0.1)


def describe(plan: Plan, tokenizer: Path | None = None) -> dict[str, Any]:
    """Return what run.json holds of a plan."""
    converted = [phase.data for phase in plan.phases if phase.data]
    hashes = {data.manifest["tokenizer"]["hash"] for data in converted}
    ends = {data.eod for data in converted}
    if len(hashes) > 1 or len(ends) > 1:
        raise UserError("the phases were converted with different tokenizers: convert them again")
    return {
        "name": plan.params.name,
        "version": __version__,
        "model": plan.params.model,
        "vocab_size": plan.params.model["vocab_size"],
        "tokenizer": str(tokenizer.absolute()) if tokenizer else None,
        "tokenizer_hash": hashes.pop() if hashes else None,
        "end_of_document_id": ends.pop() if ends else None,
        "arguments_hash": arguments_hash(plan),
        "phases": [_describe_phase(phase) for phase in plan.phases],
    }


def _describe_phase(phase: PhasePlan) -> dict[str, Any]:
    arguments = _lasting(phase.arguments)
    if arguments.get("lr_decay_style") == "constant":
        # Of no effect then; it is the end of the whole training, which later phases may move.
        del arguments["lr_decay_samples"]
    return {
        "name": phase.name,
        "content_hash": phase.data.content_hash if phase.data else None,
        "rows": phase.data.manifest["counts"]["rows"] if phase.data else None,
        "documents": phase.data.num_documents if phase.data else None,
        "tokens": phase.tokens,
        "samples": phase.samples,
        "steps": phase.steps,
        "arguments": arguments,
    }


def _lasting(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a run has to keep."""
    return {k: v for k, v in arguments.items() if k not in CHANGEABLE | _DERIVED}


def arguments_hash(plan: Plan) -> str:
    """Return the hash of all phases' Megatron arguments."""
    return sha256_of_json([phase.argv for phase in plan.phases])


def recorded(run: Path) -> dict[str, Any] | None:
    """Return run.json, or None where the run was not begun."""
    return read_manifest(run, "run", RUN_FILE) if (run / RUN_FILE).exists() else None


def to_record(
    plan: Plan, run: Path, tokenizer: Path | None = None, allow_change: bool = False
) -> dict[str, Any]:
    """Return what run.json is to hold, once the plan is held against the one that it holds.

    A phase that has not begun may get its data, where its tokens were assumed before.

    Raises:
        UserError: the plan was changed, and ``allow_change`` is not given, or the shape of the
            model was; the message has the old value and the new one.
    """
    body = describe(plan, tokenizer)
    before = recorded(run)
    if before and before["tokenizer_hash"] == body["tokenizer_hash"]:
        body["tokenizer"] = body["tokenizer"] or before["tokenizer"]
    if before and latest_step(run):
        _check_shape(before["model"], body["model"], run)
        changes = [c for pair in _phases(before, body) if (c := _first_difference(*pair))]
        if changes and not allow_change:
            raise UserError(
                f"{run} was begun with another plan: {changes[0]}; give the old value, another "
                "folder with --output, or --allow-change if the change is meant"
            )
        body["changes"] = before.get("changes", [])
        body["changes"] += [f"from step {latest_step(run)} on: {c}" for c in changes]
    return body


def record(
    plan: Plan, run: Path, tokenizer: Path | None = None, allow_change: bool = False
) -> None:
    """Write run.json, if the plan may be trained; see `to_record`."""
    write_manifest(run, "run", to_record(plan, run, tokenizer, allow_change), RUN_FILE)


@contextlib.contextmanager
def while_recorded(
    plan: Plan, run: Path, tokenizer: Path | None = None, allow_change: bool = False
) -> Iterator[None]:
    """Record a plan, as `record` does, for as long as it is trained.

    A change of plan with which not one checkpoint was written did not take effect: run.json then
    says again what it said before.
    """
    step, before = latest_step(run), recorded(run)
    record(plan, run, tokenizer, allow_change)
    changed = before and before.get("changes") != (recorded(run) or {}).get("changes")
    try:
        yield
    finally:
        if before and step and changed and latest_step(run) == step:
            body = {k: v for k, v in before.items() if k not in ("kind", "seal")}
            write_manifest(run, "run", body, RUN_FILE)


def _check_shape(old: Mapping[str, Any], new: Mapping[str, Any], run: Path) -> None:
    for key in SHAPE:
        if (old.get(key) or None) != (new.get(key) or None):
            raise UserError(
                f"{key} was {old.get(key)!r} and is now {new.get(key)!r}: the shape of the model "
                f"in the checkpoints of {run} cannot change; give the old value, or another "
                "folder with --output"
            )


def _phases(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[Any, Any, str]]:
    """Yield the pairs of values that have to be the same, and what they are called."""
    names = [[phase["name"] for phase in run["phases"]] for run in (old, new)]
    yield names[0], names[1], "phases"
    if names[0] != names[1]:
        return
    for a, b in zip(old["phases"], new["phases"], strict=True):
        # A version that let less change has noted more.
        a = {**a, "arguments": _lasting(a["arguments"])}
        if a["content_hash"] is None:  # its data was not there yet
            yield a["arguments"], b["arguments"], f"{a['name']} arguments"
        else:
            yield a, b, a["name"]


def _first_difference(old: Any, new: Any, where: str = "") -> str | None:
    """Return where two JSON values differ, with both values, or None."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            change = _first_difference(old.get(key), new.get(key), f"{where} {key}")
            if change:
                return change
        return None
    if sha256_of_json(old) == sha256_of_json(new):
        return None
    return f"{where.strip()} was {old!r} and is now {new!r}"
