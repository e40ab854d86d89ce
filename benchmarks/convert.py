"""Parquet to Megatron's file pairs: ours, Hugging Face's encoder in the same pipeline, datatrove.

    python benchmarks/convert.py --tokenizer tok --megabytes 1000 --baseline-megabytes 100

All run on the same real text (see corpus.py), whole jobs with start-up; the slow ones on the first
``--baseline-megabytes`` of it, where ours runs too. datatrove stands for the JSONL tools as well:
it encodes with the same library as Megatron's preprocess_data.py. Peak is the largest process.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import corpus
import pyarrow.parquet as pq


def ours(data: Path, output: Path, tokenizer: Path, workers: int, encoder: str) -> int:
    """Convert with kaiyuan; return the number of tokens."""
    from kaiyuan.data.convert import convert

    options = {"order": "rank", "workers": workers, "encoder": encoder}
    tokens: int = convert([data], output, tokenizer, **options)["counts"]["tokens"]
    return tokens


def datatrove(data: Path, output: Path, tokenizer: Path, workers: int, encoder: str) -> int:
    """Convert with datatrove; return the number of tokens."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    LocalPipelineExecutor(
        pipeline=[
            ParquetReader(str(data), text_key="text"),
            MegatronDocumentTokenizer(
                str(output),
                tokenizer_name_or_path=str(tokenizer / "tokenizer.json"),
                eos_token="<|endoftext|>",
            ),
        ],
        tasks=workers,
        workers=workers,
        logging_dir=str(output.with_name(output.name + ".log")),
    ).run()
    return sum(path.stat().st_size for path in output.glob("*.bin")) // 4


CONTENDERS = {"ours": (ours, "fast"), "hf": (ours, "hf"), "datatrove": (datatrove, "hf")}


def contend(name: str, data: Path, output: Path, tokenizer: Path, workers: int) -> None:
    """Run one contender in this process and print the number of tokens."""
    run, encoder = CONTENDERS[name]
    print(run(data, output, tokenizer, workers, encoder))


def usage(session: int) -> dict[int, tuple[float, int]]:
    """Return (seconds of CPU, peak bytes) of each process of a session, from /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            status = (folder / "status").read_text()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session and "VmHWM" in status:
            ticks = int(fields[11]) + int(fields[12])
            peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
            found[int(folder.name)] = (ticks / os.sysconf("SC_CLK_TCK"), peak)
    return found


def measure(name: str, data: Path, tokenizer: Path, workers: int) -> dict[str, float]:
    """Run one contender in processes of its own, start-up and all."""
    text = sum(
        len(value.as_py().encode())
        for path in sorted(data.glob("*.parquet"))
        for value in pq.read_table(path, columns=["text"])["text"]
    )
    seen: dict[int, tuple[float, int]] = {}
    with tempfile.TemporaryDirectory(dir=data.parent) as scratch:
        command = [sys.executable, __file__, "--only", name, "--data", str(data), "--output"]
        command += [f"{scratch}/out", "--tokenizer", str(tokenizer), "--workers", str(workers)]
        log, answer = Path(scratch, "log"), Path(scratch, "answer")
        start = time.monotonic()
        with log.open("w") as errors, answer.open("w") as stdout:
            process = subprocess.Popen(
                command, stdout=stdout, stderr=errors, start_new_session=True
            )
            while process.poll() is None:
                seen |= usage(process.pid)
                time.sleep(0.1)
        seconds = time.monotonic() - start
        if process.returncode:
            sys.exit(f"{name} failed:\n{log.read_text()}")
        tokens = int(answer.read_text().split()[-1])
    cpu = sum(spent for spent, _ in seen.values())
    peak = max(peak for _, peak in seen.values())
    return {"tokens": tokens, "cpu": cpu, "peak": peak, "seconds": seconds, "text": text}


def table(rows: list[tuple[str, dict[str, float]]]) -> None:
    """Print speeds, and how each relates to the last row of the same size."""
    print("| what | text MB | s | MB/s | tokens/s | CPU s | peak GB | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    slowest = rows[-1][1]["text"] / rows[-1][1]["seconds"]
    for name, found in rows:
        speed = found["text"] / found["seconds"]
        print(
            f"| {name} | {found['text'] / 1e6:.0f} | {found['seconds']:.1f} | {speed / 1e6:.1f} "
            f"| {found['tokens'] / found['seconds']:,.0f} | {found['cpu']:.1f} "
            f"| {found['peak'] / 1e9:.2f} | {speed / slowest:.1f} |"
        )


def main() -> None:
    """Build the text, run all contenders, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--baseline-megabytes", type=int, default=100)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--data", type=Path, default=Path("benchmark-data"))
    parser.add_argument("--only", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        contend(options.only, options.data, options.output, options.tokenizer, options.workers)
        return
    whole, part = options.data / "whole", options.data / "part"
    if not whole.exists():
        for name, size in corpus.build(whole, options.megabytes).items():
            print(f"{name}: {size:.0f} MB of distinct text")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    size = 0
    for path in sorted(whole.glob("*.parquet")):
        if size < options.baseline_megabytes * 1e6:
            shutil.copy(path, part)
            meta = pq.read_metadata(path)
            size += sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
    print(f"{options.workers} workers; load before: {os.getloadavg()[0]:.1f}")
    rows = [("ours, all", measure("ours", whole, options.tokenizer, options.workers))]
    for name in CONTENDERS:
        rows.append((name, measure(name, part, options.tokenizer, options.workers)))
    table(rows)
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
