"""Train one model in several layouts from one checkpoint: the curves and the order must agree.

    python benchmarks/layouts.py --data converted/phase1 --output curves.csv
    python benchmarks/layouts.py --layouts "DP 2" "TP 2" "TP 2 then PP 2"

One GPU makes the checkpoint after two steps, and goes on from it, twice at the same time. Each
layout goes on from it, too. A layout is right if its losses over the second half are as near to
those of one GPU as bf16 and another order of sums allow: much nearer than those of another seed,
which is trained in the same run. "TP 2 then PP 2" goes on from the middle of the run "TP 2".

Every run notes the tokens that reach the model (not those with the sequence split, CP 2); they must
be those of the data, sample after sample. Without --data, the text is the Python sources of the
standard library and of the installed packages, as in loss_curve.py.

On a CPU, --gpus 2 --model toy --batch 8 --steps 10 tries this program over gloo.
"""

import argparse
import csv
import dataclasses
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import loss_curve
import numpy as np
import ranks
from scaling import all_layouts

from kaiyuan.config import load_params, to_argv
from kaiyuan.data.phase import ConvertedPhase

START = 2  # steps before the common checkpoint
REFERENCE, AGAIN, OTHER = "1 GPU", "1 GPU again", "1 GPU, other seed"
RESUMED = "TP 2 then PP 2"


@dataclasses.dataclass(frozen=True)
class Run:
    """A training.

    Attributes:
        name: of its files.
        layout: of scaling.py.
        gpus: number of processes.
        load: folder of checkpoints to go on from; "" to begin anew.
        load_step: of the checkpoint.
        save: whether to save in the middle and at the end.
        stop: step after which it saves and ends; 0 for none.
        seed: of the initial weights.
    """

    name: str
    layout: str = REFERENCE
    gpus: int = 1
    load: str = ""
    load_step: int = START
    save: bool = False
    stop: int = 0
    seed: int = 1234


def main() -> None:
    """Train all, or be one of the trainings."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt_smoke")
    parser.add_argument("--gpus", type=int, help="all that are found, unless given")
    parser.add_argument("--data", type=Path, help="a converted phase")
    parser.add_argument("--layouts", nargs="+", help="DP 2, DP 4, DP 8, TP 2, PP 2, ...")
    parser.add_argument("--steps", type=int, default=52)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--at-once", type=int, default=1, help="layouts that share the GPUs")
    parser.add_argument("--limit", type=int, default=90, help="seconds a training")
    parser.add_argument("--scratch", type=Path, help="folder for checkpoints and logs")
    parser.add_argument("--output", type=Path, default=Path("curves.csv"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args, Run(**json.loads(args.worker)))
    elif args.scratch:
        train_all(args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            args.scratch = Path(folder)
            train_all(args)


def train_all(args: argparse.Namespace) -> None:
    """Train all and compare them."""
    gpus = args.gpus or ranks.num_gpus()
    if gpus < 2:
        sys.exit("two GPUs are needed; --gpus 2 --model toy tries this program on a CPU")
    for folder in (args.scratch, args.output.parent):
        folder.mkdir(parents=True, exist_ok=True)
    params = load_params(args.model)
    length = params.model["seq_length"]
    if args.data:
        tokens_in_all = ConvertedPhase.open(args.data).num_tokens
        if tokens_in_all <= args.steps * args.batch * length:
            sys.exit(f"{args.data} has {tokens_in_all} tokens, too few for {args.steps} steps")
    else:
        count = args.steps * args.batch * length + 1
        tokens = loss_curve.read_tokens(count, params.model["vocab_size"])
        np.save(args.scratch / "text.npy", tokens)
    start = "start"
    rows = [
        [Run(start, save=True, stop=START), Run(OTHER, seed=1235)],
        [Run(REFERENCE, load=start), Run(AGAIN, load=start)],
    ]
    names = args.layouts or default_layouts(gpus)
    runs = []
    for name in names:
        if name != RESUMED:
            layout = "DP" if name.startswith("DP") else name
            runs.append(Run(name, layout, int(name.split()[1]), start, save=name == "TP 2"))
    rows += [runs[i : i + args.at_once] for i in range(0, len(runs), args.at_once)]
    if RESUMED in names:
        rows.append([Run(RESUMED, "PP 2", 2, "TP 2", load_step=args.steps // 2)])
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        curves |= train(args, row)
        if start not in curves:
            sys.exit("there is no checkpoint to begin from")
    with args.output.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["step", *curves])
        for step in range(1, args.steps + 1):
            writer.writerow([step, *(curve.get(step, "") for curve in curves.values())])
    report(args, curves, length)


def default_layouts(gpus: int) -> list[str]:
    """Return the layouts that so many GPUs allow."""
    data_parallel = [f"DP {n}" for n in (2, 4, 8) if n <= gpus]
    return [*data_parallel, "TP 2", "PP 2", "PP 2 virtual 2", "CP 2", RESUMED]


def train(args: argparse.Namespace, runs: list[Run]) -> dict[str, dict[int, float]]:
    """Train side by side; return the losses by step of those that did not fail."""
    jobs = []
    for i, run in enumerate(runs):
        command = [sys.executable, __file__, "--worker", json.dumps(dataclasses.asdict(run))]
        for name in ("model", "steps", "batch", "scratch"):
            command += [f"--{name}", str(getattr(args, name))]
        command += ["--data", str(args.data)] if args.data else []
        spied = args.scratch / f"{run.name} samples"
        spied.mkdir(exist_ok=True)
        spy = {} if run.layout.startswith("CP") else {"KAIYUAN_SPY": str(spied)}
        jobs.append(ranks.Job(run.name, command, run.gpus, i if run.gpus == 1 else 0, spy))
    began = time.monotonic()
    answers = ranks.run(jobs, args.scratch / "logs", args.limit)
    curves = {}
    for run, answer in zip(runs, answers, strict=True):
        if isinstance(answer, ranks.Failed):
            print(f"{run.name} failed: {answer}", flush=True)
        else:
            print(f"{run.name}: {time.monotonic() - began:.0f} s", flush=True)
            with (args.scratch / f"{run.name}.csv").open() as stream:
                rows = list(csv.DictReader(stream))
            curves[run.name] = {int(row["iteration"]): float(row["loss"]) for row in rows}
    return curves


def report(args: argparse.Namespace, curves: dict[str, dict[int, float]], length: int) -> None:
    """Print how far each curve is from that of one GPU, and whether the order is the data's."""
    if REFERENCE not in curves or OTHER not in curves:
        sys.exit("the trainings on one GPU failed: there is nothing to compare with")
    reference = curves[REFERENCE]
    spread, _ = distance(curves[OTHER], reference, args.steps)
    expected = expected_samples(args, length)
    print(f"\nmean distance of another seed over the second half: {spread:.5f} nats\n")
    print("| run | steps | last loss | mean distance | highest | of the seeds' | curve | order |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name, curve in curves.items():
        order = check_order(args, name, expected)
        steps = f"{min(curve)} to {max(curve)}"
        if max(curve) <= args.steps // 2:
            print(f"| {name} | {steps} | {curve[max(curve)]:.5f} | | | | | {order} |")
            continue
        mean, highest = distance(curve, reference, args.steps)
        verdict = "the other seed" if name == OTHER else "ok" if mean < spread else "WRONG"
        print(
            f"| {name} | {steps} | {curve[max(curve)]:.5f} | {mean:.6f} | {highest:.6f} "
            f"| {100 * mean / spread if spread else 0:.1f}% | {verdict} | {order} |"
        )


def distance(curve: dict[int, float], other: dict[int, float], steps: int) -> tuple[float, float]:
    """Return the mean and the highest absolute difference over the second half."""
    common = [step for step in curve if step > steps // 2 and step in other]
    differences = [abs(curve[step] - other[step]) for step in common]
    return statistics.mean(differences), max(differences)


def expected_samples(args: argparse.Namespace, length: int) -> list[str]:
    """Return the hashes of the samples that all steps must train on, as the data says."""
    samples = ordered_samples(args, length)
    count = args.steps * args.batch
    rows = (samples[i]["tokens"].numpy() for i in range(count))
    return [hashlib.md5(row.tobytes()).hexdigest() for row in rows]


def ordered_samples(args: argparse.Namespace, length: int) -> Any:
    """Return the samples of the data, or of the text, in their order."""
    import torch

    from kaiyuan.data.samples import OrderedDataset

    if args.data:
        return OrderedDataset(ConvertedPhase.open(args.data), length)
    text = np.load(args.scratch / "text.npy", mmap_mode="r")

    class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return (len(text) - 1) // length

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            stream = torch.from_numpy(text[index * length : (index + 1) * length + 1].copy())
            return {
                "tokens": stream[:-1].clone(),
                "labels": stream[1:].clone(),
                "loss_mask": torch.ones(length),
                "position_ids": torch.arange(length),
            }

    return Samples()


def check_order(args: argparse.Namespace, name: str, expected: list[str]) -> str:
    """Return whether the tokens that reached the model are those of the data, in its order."""
    taken: dict[tuple[int, int, int], list[str]] = {}
    for file in (args.scratch / f"{name} samples").iterdir():
        for line in file.read_text().splitlines():
            step, number, place, *rows = line.split()
            if taken.setdefault((int(step), int(number), int(place)), rows) != rows:
                return "WRONG: ranks of one model see different samples"
    if not taken:
        return "not noted"
    seen = [row for _, rows in sorted(taken.items()) for row in rows]
    first, last = min(taken)[0], max(taken)[0]
    right = seen == expected[(first - 1) * args.batch : last * args.batch]
    return f"ok, {len(seen)} samples" if right else "WRONG"


# ---- in the training processes ----


def work(args: argparse.Namespace, run: Run) -> None:
    """Train as one rank."""
    from kaiyuan.megatron import pretrain
    from tests import spy_rank

    spy_rank.install()
    params = load_params(args.model)
    if not args.data:
        samples = ordered_samples(args, params.model["seq_length"])

        def provide(_: Any, vp_stage: int | None = None) -> Any:
            return samples, None, None

        provide.is_distributed = True  # type: ignore[attr-defined]
        pretrain.provide_datasets = provide  # type: ignore[assignment]
    layout = all_layouts(params.model)[run.layout]
    data_parallel = run.gpus // (layout.tensor * layout.pipeline * layout.context)
    samples_in_all = args.steps * args.batch
    changes = {
        "micro_batch_size": min(4, args.batch // data_parallel),
        "global_batch_size": args.batch,
        "train_samples": samples_in_all,
        "lr_warmup_samples": args.batch * (args.steps // 5),
        "lr_decay_samples": samples_in_all,
        "override_opt_param_scheduler": True,
        "seed": run.seed,
        "data_path": str(args.data or "none"),
        "data_cache_path": str(args.scratch / "cache"),
        "record_to": str(args.scratch / f"{run.name}.csv"),
        "log_interval": 100,
        "num_workers": 1,
        "exit_signal_handler": False,
        "save_interval": args.steps // 2,
    }
    if run.load:
        changes |= {"load": str(args.scratch / run.load), "ckpt_step": run.load_step}
        changes["exit_on_missing_checkpoint"] = True
    if run.save:
        changes["save"] = str(args.scratch / run.name)
    if run.stop:
        changes["exit_interval"] = run.stop
    argv = [*to_argv({**params.model, **params.hparams, **changes}), *layout.argv()]
    try:
        pretrain.run(argv)
    except SystemExit as end:  # at exit_interval
        if end.code:
            raise
    ranks.say({"rank": os.environ["RANK"]})


if __name__ == "__main__":
    main()
