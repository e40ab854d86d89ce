"""Train with our layers, go on with TransformerEngine's and with ours again: the losses agree.

    python benchmarks/exchange.py --data converted --te-path /opt/te --folder work

One run goes through 3 x --steps without an interruption. Two others begin from its first
checkpoint: one goes on with our layers, which shows how far a GPU's own noise carries two runs
apart, the other with TransformerEngine's layers and then, from their checkpoint, with ours. The
table has the differences of their losses from those of the first. Needs one GPU; a second one, if
there is one, is used at the same time.

--te-path is the folder with TransformerEngine, where it is not installed in the environment.
On a CPU, `--model toy --rehearse` tries this program with our layers in its place.
"""

import argparse
import csv
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ranks

ROOT = Path(__file__).resolve().parent.parent
UNBROKEN, OURS, EXCHANGED = "unbroken", "ours", "exchanged"
TRACKER = "latest_checkpointed_iteration.txt"


def main() -> None:
    """Train the three and compare them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt_smoke")
    parser.add_argument("--data", type=Path, required=True, help="the converted phases")
    parser.add_argument("--folder", type=Path, required=True, help="gets three runs; must be new")
    parser.add_argument("--te-path", default="")
    parser.add_argument("--steps", type=int, default=20, help="of each of the three parts")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    train(args, UNBROKEN, 3)
    for name in (OURS, EXCHANGED):
        begin_from_first(args, name)

    def exchanged() -> None:
        train(args, EXCHANGED, 2, gpu=1, te=not args.rehearse)
        train(args, EXCHANGED, 3, gpu=1, back=True)

    with ThreadPoolExecutor() as pool:
        for job in (pool.submit(train, args, OURS, 3), pool.submit(exchanged)):
            job.result()
    report(args)


def train(
    args: argparse.Namespace,
    name: str,
    parts: int,
    gpu: int = 0,
    te: bool = False,
    back: bool = False,
) -> None:
    """Train a run to the end of so many parts."""
    steps = args.steps * parts
    command = [sys.executable, "-m", "kaiyuan", "train", args.model, "--data", args.data]
    command += ["--output", args.folder / name, "--phase", "phase1"]
    command += [
        f"phase1.max_samples={3 * args.steps * args.batch}",
        f"global_batch_size={args.batch}",
    ]
    command += [f"lr_warmup_samples={args.batch * args.steps}", f"save_interval={args.steps}"]
    command += [f"micro_batch_size={min(4, args.batch)}", f"exit_interval={steps}"]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if te:
        command += ["transformer_impl=transformer_engine", "no_rope_fusion=false"]
        paths.insert(0, args.te_path)
    if te or back:
        command.append("--allow-change")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(ranks.num_gpus()))))
    devices = visible.split(",")
    environment = os.environ | {
        "PYTHONPATH": ":".join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": devices[gpu % len(devices)],
    }
    began = time.monotonic()
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    if done.returncode:
        logs = sorted((args.folder / name / "logs").glob("*.log"))
        tail = logs[-1].read_text(errors="replace").splitlines()[-40:] if logs else []
        sys.exit("\n".join([*tail, f"{name}, part {parts}: {done.stderr.strip()}"]))
    print(f"{name} to step {steps}: {time.monotonic() - began:.0f} s", flush=True)


def begin_from_first(args: argparse.Namespace, name: str) -> None:
    """Copy the unbroken run as it was at its first checkpoint."""
    first = f"iter_{args.steps:07d}"
    shutil.copytree(
        args.folder / UNBROKEN,
        args.folder / name,
        ignore=lambda _, names: [n for n in names if n.startswith("iter_") and n != first],
    )
    (args.folder / name / "checkpoints" / TRACKER).write_text(str(args.steps))


def report(args: argparse.Namespace) -> None:
    """Print the table, and end with an error where the exchange costs more than noise does."""
    curves = {}
    for name in (UNBROKEN, OURS, EXCHANGED):
        with (args.folder / name / "loss.csv").open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        curves[name] = {int(row["iteration"]): float(row["loss"]) for row in rows}
    print("\n| run | steps | first difference | mean | largest | last loss |")
    print("|---|---|---|---|---|---|")
    means = {}
    for name in (OURS, EXCHANGED):
        for part in (2, 3):
            steps = range((part - 1) * args.steps + 1, part * args.steps + 1)
            apart = [abs(curves[name][i] - curves[UNBROKEN][i]) for i in steps]
            means[name, part] = statistics.mean(apart)
            print(
                f"| {name} | {steps[0]} to {steps[-1]} | {apart[0]:.6f} | {means[name, part]:.6f} "
                f"| {max(apart):.6f} | {curves[name][steps[-1]]:.5f} |"
            )
    if any(means[EXCHANGED, part] > 2 * means[OURS, part] + 0.02 for part in (2, 3)):
        sys.exit("the exchange costs more than the noise of two runs")


if __name__ == "__main__":
    main()
