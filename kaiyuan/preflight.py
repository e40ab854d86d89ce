"""Everything that can be found wrong with a training before a GPU is held, all at once."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kaiyuan.checkpoint.describe import CHECKPOINTS, TRACKER, CheckpointInfo, megatrons_choice
from kaiyuan.checkpoint.hf_config import sizes_of
from kaiyuan.config import MEGATRON_VERSIONS, Params, to_argv
from kaiyuan.data.tokenizer import load_tokenizer
from kaiyuan.data.verify import verify
from kaiyuan.errors import UserError
from kaiyuan.estimate import checkpoint_bytes
from kaiyuan.files import check_writable, nearest
from kaiyuan.plan import PhasePlan, Plan, converted_phase, make_plan
from kaiyuan.plan_summary import batch_layout, kept_checkpoints, model_processes
from kaiyuan.progress import human_bytes
from kaiyuan.runfolder import RUN_FILE, arguments_hash, latest_step, recorded, to_record
from kaiyuan.train import Nodes, check_layout, chosen_phases


def preflight(
    params: Params,
    data: Path,
    run: Path,
    nodes: Nodes,
    tokenizer: Path | None = None,
    only: str | None = None,
    hashes: bool = False,
    allow_change: bool = False,
) -> Plan:
    """Check a training and return its plan.

    Args:
        params: of the model.
        data: folder with the converted phases.
        run: folder of the run, which need not exist.
        nodes: the processes to train with.
        tokenizer: folder, to be held against the one of the data.
        only: name of the single phase to be trained.
        hashes: read all data and compare it with the hashes in the manifests.
        allow_change: the plan may differ from the one that the run was begun with.

    Raises:
        UserError: something is wrong; the message has all that was found.
    """
    findings: list[str] = []
    for phase in params.phases:
        _found(findings, partial(converted_phase, phase, params, data))
    plan = None
    if not findings:
        try:
            plan = make_plan(params, data)
            _check_converted(chosen_phases(plan, only), data)
        except UserError as error:
            findings.append(str(error))
    if plan is None:
        # Without usable data the rest is checked on the tokens that data.yaml assumes, if it does.
        with contextlib.suppress(UserError):
            plan = make_plan(params)
    checks: list[Callable[[], object]] = [
        partial(check_layout, params, nodes),
        partial(_check_gpus, nodes),
        _check_versions,
        partial(_check_packages, params),
        partial(_check_output, run),
    ]
    if plan:
        checks += [
            partial(_check_tokenizer, plan, tokenizer),
            partial(_check_start, plan, run),
            partial(_check_disk, plan, run, only),
            partial(_check_arguments, plan, run, nodes),
        ]
        checks += [partial(_check_hashes, phase) for phase in plan.phases if hashes]
    for check in checks:
        _found(findings, check)
    if plan and not findings:
        _found(findings, partial(_check_change, plan, run, allow_change))
    if findings or plan is None:
        raise UserError(_sentence(list(dict.fromkeys(findings))))
    return plan


def _found(findings: list[str], check: Callable[[], object]) -> None:
    try:
        check()
    except UserError as error:
        findings.append(str(error))


def _check_converted(phases: Sequence[PhasePlan], data: Path) -> None:
    missing = [phase.name for phase in phases if phase.data is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{', '.join(missing)} {verb} not converted yet: {data} lacks the data")


def _sentence(findings: list[str]) -> str:
    if len(findings) == 1:
        return findings[0]
    listed = "; ".join(f"({i}) {finding}" for i, finding in enumerate(findings, start=1))
    return f"{len(findings)} things stand in the way: {listed}"


def gpu_count() -> int:
    """Return the number of GPUs that processes here may use, 0 without any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0


def _check_gpus(nodes: Nodes) -> None:
    gpus = gpu_count()
    if 0 < gpus < nodes.processes:
        raise UserError(
            f"{nodes.processes} processes are asked for, but there are {gpus} GPUs here"
        )


def _check_versions() -> None:
    try:
        version = importlib.metadata.version("megatron-core")
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(f"{error.name} is not installed: pip install 'kaiyuan[train]'") from None
    if version not in MEGATRON_VERSIONS:
        raise UserError(
            f"megatron-core is {version}, this project is made for {', '.join(MEGATRON_VERSIONS)}: "
            f"pip install megatron-core=={MEGATRON_VERSIONS[-1]}"
        )


def _check_packages(params: Params) -> None:
    """Look for the packages that some arguments ask for."""
    phases = [params.arguments(phase) for phase in params.phases]
    asked = any(phase.get("wandb_project") for phase in phases)
    if asked and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "wandb_project is given, but wandb is not installed: pip install 'kaiyuan[wandb]'"
        )
    ours = all(phase.get("transformer_impl") == "local" for phase in phases)
    if not ours and importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            "transformer_impl is transformer_engine, but that package is not installed: take "
            "transformer_impl=local, our own layers"
        )


def _check_tokenizer(plan: Plan, tokenizer: Path | None) -> None:
    found = {
        phase.name: (phase.data.manifest["tokenizer"]["hash"], phase.data.eod)
        for phase in plan.phases
        if phase.data
    }
    if tokenizer:
        given = load_tokenizer(tokenizer).hash
        other = [name for name, (known, _) in found.items() if known != given]
        if other:
            verb = "was" if len(other) == 1 else "were"
            raise UserError(f"{', '.join(other)} {verb} not converted with {tokenizer}")
    if len(set(found.values())) > 1:
        parts = ", ".join(f"{n}: {h[:12]} ending with {e}" for n, (h, e) in found.items())
        raise UserError(
            f"the phases were converted with different tokenizers or end-of-document tokens "
            f"({parts}): convert them again"
        )


def _check_change(plan: Plan, run: Path, allow_change: bool) -> None:
    try:
        latest_step(run)
    except UserError:
        return  # a tracker that was cut short is mended later
    to_record(plan, run, allow_change=allow_change)


def tokenizer_beside(plan: Plan, data: Path) -> Path | None:
    """Return the folder ``tokenizer`` in the data's or beside it, if the data were made with it."""
    hashes = {phase.data.manifest["tokenizer"]["hash"] for phase in plan.phases if phase.data}
    for folder in (data / "tokenizer", data.absolute().parent / "tokenizer"):
        with contextlib.suppress(UserError):
            if folder.is_dir() and {load_tokenizer(folder).hash} == hashes:
                return folder
    return None


def _check_start(plan: Plan, run: Path) -> None:
    """Hold the weights that the run is to begin with against its model.

    Megatron takes them where the run has no checkpoint yet, and says little where they do not fit.
    """
    arguments = plan.phases[0].arguments
    start = arguments.get("pretrained_checkpoint")
    if start and not (run / CHECKPOINTS / TRACKER).exists():
        from kaiyuan.checkpoint.load import ModelTensors, TorchDistCheckpoint  # they load torch

        if (Path(start) / CHECKPOINTS / TRACKER).is_file():
            raise UserError(
                f"pretrained_checkpoint={start} is the folder of a run: give {start}/{CHECKPOINTS}"
            )
        folder = megatrons_choice(Path(start))
        info = CheckpointInfo(folder, 0, arguments, arguments["vocab_size"], None)
        ModelTensors(TorchDistCheckpoint(folder), sizes_of(info))


# What a training that came to nothing may leave, beside hidden files.
_BEGUN = {CHECKPOINTS, "logs", "cache", "tensorboard", "wandb", "loss.csv", "starts.jsonl"}


def _check_output(run: Path) -> None:
    """Write to the nearest folder that exists; a file is none, and another's folder neither."""
    if run.is_dir() and not (run / RUN_FILE).exists():
        names = {path.name for path in run.iterdir() if not path.name.startswith(".")}
        foreign = sorted(names - _BEGUN)
        if foreign:
            raise UserError(
                f"{run} holds {foreign[0]} and no {RUN_FILE}: it is no run of kaiyuan's; give a "
                "new folder with --output"
            )
    check_writable(run)


def _check_disk(plan: Plan, run: Path, only: str | None) -> None:
    """Compare the free space with the checkpoints that this command is still to write."""
    place = nearest(run)
    done = 0
    with contextlib.suppress(UserError):  # a tracker that was cut short is mended later
        done = latest_step(run)
    last = _last_step(plan, only, done)
    # The last is written before the one that it takes the place of is removed.
    to_come = len([step for step in kept_checkpoints(plan, last) if step > done]) + 1
    needed = to_come * checkpoint_bytes(plan.phases[0].arguments)
    free = shutil.disk_usage(place).free
    if done < last and free < needed:
        raise UserError(
            f"{to_come} more checkpoints need {human_bytes(needed)}, {place} has "
            f"{human_bytes(free)} left: raise save_interval or save_retain_interval, or take "
            "another --output"
        )


def _last_step(plan: Plan, only: str | None, done: int) -> int:
    """Return the step at which this command ends: of its phases, or Megatron's exit_interval."""
    for phase in chosen_phases(plan, only):
        if phase.last_step > done:
            interval = phase.arguments.get("exit_interval")
            following = (done // interval + 1) * interval if interval else phase.last_step
            if following < phase.last_step:
                return following
            done = phase.last_step
    return done


def _check_hashes(phase: PhasePlan) -> None:
    if phase.data is not None:
        verify(phase.data.folder)


def _without_tracking(phase: PhasePlan) -> dict[str, Any]:
    # Megatron begins to write to these as soon as it has parsed them.
    trackers = ("wandb_project", "tensorboard_dir")
    return {name: value for name, value in phase.arguments.items() if name not in trackers}


def _check_arguments(plan: Plan, run: Path, nodes: Nodes) -> None:
    """Let Megatron's own parser judge the arguments of all phases.

    Loading Megatron takes seconds, so this is left out where a run goes on with the very
    arguments that it was begun with.
    """
    before = recorded(run)
    if before and before.get("arguments_hash") == arguments_hash(plan):
        return
    processes = nodes.processes * nodes.nodes
    question = {phase.name: _judged(_without_tracking(phase), processes) for phase in plan.phases}
    answer = subprocess.run(
        [sys.executable, "-m", "kaiyuan.megatron.arguments", "--check"],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        env={**os.environ, "RANK": "0", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    if answer.returncode:
        lines = answer.stderr.strip().splitlines() or ["no answer"]
        raise UserError(f"Megatron cannot be loaded: {lines[-1]}")
    refused: dict[str, list[str]] = {}
    for name, why in json.loads(answer.stdout.splitlines()[-1]).items():
        refused.setdefault(why, []).append(name)
    if refused:
        raise UserError("; ".join(_of_phases(plan, names) + why for why, names in refused.items()))


def _judged(arguments: dict[str, Any], processes: int) -> tuple[int, list[str]]:
    """Return the processes and the command line that Megatron is asked about.

    Where the batch does not divide among the processes, which `check_layout` says, others that do:
    Megatron would say the same in other words, and nothing of what else is wrong.
    """
    try:
        batch_layout(arguments, processes)
    except UserError:
        processes = model_processes(arguments)
        arguments = arguments | {"micro_batch_size": 1}
    return processes, to_argv(arguments)


def _of_phases(plan: Plan, names: list[str]) -> str:
    return "" if len(names) == len(plan.phases) > 1 else f"{', '.join(names)}: "
