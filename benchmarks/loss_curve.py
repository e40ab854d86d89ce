"""Train a model for 300 steps twice over, with our kernels and with plain operations.

    python benchmarks/loss_curve.py --seeds 1234 1235 --output curves.csv

Meant for one CUDA device (the plain operations need 45 GiB for gpt_smoke), one training after the
other. On a CPU, with --model toy, both are plain, which only tries this program. All train on the
Python sources of the standard library and of the installed packages, cut into words and signs that
are numbered as they first appear. A seed sets the initial weights and where in the text each step
reads. The kernels are right if the two losses of one seed are nearer to each other than those of
two seeds.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import train as bench


def main() -> None:
    """Train all, or be one of the trainings."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gpt_smoke")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1234, 1235])
    parser.add_argument("--paths", nargs="+", default=["ours", "plain"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=10_000_000, help="of the text")
    parser.add_argument(
        "--batch", type=int, default=8, help="sequences a step, in micro-batches of 4"
    )
    parser.add_argument("--output", type=Path, default=Path("curves.csv"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
    else:
        train_all(args)


def train_all(args: argparse.Namespace) -> None:
    """Run the trainings one after another and compare their losses."""
    curves = {}
    for number, (path, seed) in enumerate((p, s) for s in args.seeds for p in args.paths):
        command = [sys.executable, __file__, "--worker", path, "--seeds", str(seed)]
        for name in ("model", "steps", "tokens", "batch"):
            command += [f"--{name}", str(getattr(args, name))]
        environment = os.environ | bench.single_process(number)
        log = args.output.with_name(f"{path}-{seed}.log")
        with log.open("w") as out:
            subprocess.run(command, env=environment, stdout=out, stderr=out)
        found = [x.split()[1:] for x in log.read_text().splitlines() if x.startswith("LOSSES")]
        if not found:
            sys.exit(f"the training {path} with seed {seed} failed: see {log}")
        curves[path, seed] = [float(loss) for loss in found[0]]
        print(f"{path}, seed {seed}: {args.steps} steps", flush=True)
    with args.output.open("w") as out_file:
        print("step", *(f"{p}-{s}" for p, s in curves), sep=",", file=out_file)
        for step, row in enumerate(zip(*curves.values(), strict=True), 1):
            print(step, *(f"{loss:.6f}" for loss in row), sep=",", file=out_file)
    report(args, curves)


def report(args: argparse.Namespace, curves: dict[tuple[str, int], list[float]]) -> None:
    """Print the losses at some steps and the mean distances over the second half."""
    print("| step |", " | ".join(f"{p}, seed {s}" for p, s in curves), "|")
    for step in (1, 50, 100, 150, 200, 250, args.steps):
        if step <= args.steps:
            print(f"| {step} |", " | ".join(f"{c[step - 1]:.4f}" for c in curves.values()), "|")
    first, second = args.paths[0], args.paths[-1]
    for seed in args.seeds:
        print(
            f"{first} - {second}, seed {seed}:", distance(curves[first, seed], curves[second, seed])
        )
    for path in args.paths:
        pair = [curves[path, seed] for seed in args.seeds]
        print(f"seed {args.seeds[0]} - {args.seeds[-1]}, {path}:", distance(pair[0], pair[-1]))


def distance(a: list[float], b: list[float]) -> str:
    """Return the mean and the mean absolute difference over the second half of two curves."""
    half = [x - y for x, y in zip(a, b, strict=True)][len(a) // 2 :]
    return f"mean {statistics.mean(half):+.5f}, absolute {statistics.mean(map(abs, half)):.5f}"


def read_tokens(count: int, vocabulary: int) -> Any:
    """Return the first tokens of the Python sources that are installed, int64.

    The words that come when the vocabulary is full are token 0.
    """
    import numpy as np

    folders = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib")]
    files = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    ids: dict[str, int] = {}
    tokens: list[int] = []
    for path in files:
        words = re.findall(r"\w+|\s+|[^\w\s]", path.read_text(errors="ignore"))
        tokens += [
            ids.setdefault(w, len(ids)) if len(ids) < vocabulary else ids.get(w, 0) for w in words
        ]
        if len(tokens) >= count:
            break
    return np.array(tokens[:count])


def work(args: argparse.Namespace) -> None:
    """Train once and print all losses."""
    import torch

    from kaiyuan.config import load_params, to_argv
    from kaiyuan.megatron import pretrain, records

    seed = args.seeds[0]
    params = load_params(args.model)
    length = params.model["seq_length"]
    text = torch.from_numpy(read_tokens(args.tokens, params.model["vocab_size"]))

    class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return args.steps * args.batch

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
            start = int(torch.randint(len(text) - length - 1, (1,), generator=generator))
            stream = text[start : start + length + 1]
            return {
                "tokens": stream[:-1].clone(),
                "labels": stream[1:].clone(),
                "loss_mask": torch.ones(length),
                "position_ids": torch.arange(length),
            }

    def provide(_: Any, vp_stage: int | None = None) -> Any:
        return Samples(), None, None

    provide.is_distributed = True  # type: ignore[attr-defined]
    pretrain.provide_datasets = provide  # type: ignore[assignment]
    if args.worker == "plain":
        bench.use_plain_operations()
    training = records.training  # Megatron's; on a CPU it comes after our stand-in
    losses, step = [], training.train_step

    def recorded(*a: Any, **k: Any) -> Any:
        out = step(*a, **k)
        losses.append(float(out[0]["lm loss"].flatten()[0]))
        return out

    training.train_step = recorded
    changes = {
        "micro_batch_size": 4,
        "global_batch_size": args.batch,
        "train_samples": args.steps * args.batch,
        "lr_warmup_samples": args.batch * args.steps // 10,
        "lr_decay_samples": args.steps * args.batch,
        "seed": seed,
        "data_path": "none",
        "log_interval": 100,
        "no_gradient_accumulation_fusion": args.worker == "plain",
    }
    pretrain.run(to_argv({**params.model, **params.hparams, **changes}))
    print("LOSSES", *losses, flush=True)


if __name__ == "__main__":
    main()
