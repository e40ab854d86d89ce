"""Measure how a training step scales over the GPUs of one machine, layout by layout.

    python benchmarks/scaling.py --output $OUT/scaling.jsonl
    python benchmarks/scaling.py --layouts "1 GPU" "DP" "DP connections 8" "PP virtual 3"

The baseline is one GPU, measured on all GPUs at once, each by itself, so that a card that is slower
than another is seen. Then each layout takes all GPUs, in processes of its own: it first trains with
the baseline's global batch (strong scaling), then with one that grows with the GPUs (weak
scaling), two steps each that do not count and --steps that do, and last one step under torch's
profiler. Tokens are random; the output says:

    efficiency  tokens/s a GPU against the baseline's mean
    exposed     share of the profiled step in which a communication kernel ran and nothing else;
                the wait of a pipeline's stages for each other is in it
    busy comm.  share in which a communication kernel ran at all
    GB/s        that each rank receives while all gather a large tensor, after the training

On a CPU, --gpus 2 --model toy --batch 8 --micro-batch 2 tries this program over gloo.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import ranks
import train as bench

from kaiyuan.config import load_params
from kaiyuan.estimate import flops_per_token
from kaiyuan.profiling import trace

BASELINE = "1 GPU"
WARM_UP = 2
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A way to spread a model over the GPUs.

    Attributes:
        arguments: Megatron's, beside the sizes.
        tensor, pipeline, context: parallel sizes; the rest of the GPUs is data parallel.
        micro_batch_factor: times the micro-batch of the baseline.
        environment: of the processes.
        plain: without our overlap of tensor parallelism.
        overlap: whether the communication of data parallelism overlaps with the passes.
    """

    arguments: tuple[str, ...] = ()
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    micro_batch_factor: float = 1
    environment: tuple[tuple[str, str], ...] = ()
    overlap: bool = True
    plain: bool = False

    def fits(self, gpus: int) -> bool:
        """Return whether so many GPUs can be split in this way."""
        return gpus % (self.tensor * self.pipeline * self.context) == 0

    def argv(self) -> list[str]:
        """Return Megatron's arguments."""
        sizes = [f"--tensor-model-parallel-size={self.tensor}"]
        sizes += [f"--pipeline-model-parallel-size={self.pipeline}"]
        sizes += [f"--context-parallel-size={self.context}"]
        sizes += ["--sequence-parallel"] * (self.tensor > 1)
        return [*sizes, *OVERLAP * self.overlap, *self.arguments]


def all_layouts(model: dict[str, Any]) -> dict[str, Layout]:
    """Return the layouts by name; those after ``standard`` are settings to choose among."""

    def staged(stages: int, virtual: int = 1) -> tuple[str, ...]:
        return ("--pipeline-model-parallel-layout", pipeline_layout(model, stages, virtual))

    queues = (("CUDA_DEVICE_MAX_CONNECTIONS", "8"),)
    standard = {
        BASELINE: Layout(overlap=False),
        "DP": Layout(),
        "TP 2": Layout(tensor=2),
        "PP 2": Layout(staged(2), pipeline=2),
        "PP 2 virtual 2": Layout(staged(2, 2), pipeline=2),
        "CP 2": Layout(context=2),
        "TP 2 PP 2": Layout(staged(2), tensor=2, pipeline=2),
    }
    settings = {
        "1 GPU micro x2": Layout(micro_batch_factor=2, overlap=False),
        "DP no overlap": Layout(overlap=False),
        "DP connections 8": Layout(environment=queues),
        "DP bucket 200M": Layout(("--ddp-bucket-size=200000000",)),
        "DP micro x2": Layout(micro_batch_factor=2),
        "TP 2 plain": Layout(tensor=2, plain=True),
        "TP 2 micro x2": Layout(tensor=2, micro_batch_factor=2),
        "PP 2 even": Layout(pipeline=2),
        "PP 2 virtual 2 micro x0.5": Layout(staged(2, 2), pipeline=2, micro_batch_factor=0.5),
        "PP 2 virtual 2 connections 8": Layout(staged(2, 2), pipeline=2, environment=queues),
        "PP 2 virtual 3": Layout(staged(2, 3), pipeline=2),
    }
    return {**standard, **settings}


STANDARD = (BASELINE, "DP", "TP 2", "PP 2", "PP 2 virtual 2", "CP 2", "TP 2 PP 2")


def output_in_layers(model: dict[str, Any]) -> float:
    """Return what the output layer costs, in layers, by the operations of their products."""
    one = flops_per_token({**model, "num_layers": 1})
    two = flops_per_token({**model, "num_layers": 2})
    return (2 * one - two) / (two - one)


def pipeline_layout(model: dict[str, Any], stages: int, virtual: int = 1) -> str:
    """Return Megatron's ``pipeline_model_parallel_layout`` with stages that are equally heavy.

    Args:
        model: the params of the model.
        stages: of the pipeline.
        virtual: parts of each stage.
    """
    parts, layers, output = stages * virtual, model["num_layers"], output_in_layers(model)
    last = max(0, round((layers + output) / parts - output))
    counts = [(layers - last) // (parts - 1)] * (parts - 1)
    for i in range((layers - last) % (parts - 1)):
        counts[i] += 1
    words = [f"t*{count}" if count else "" for count in [*counts, last]]
    return "|".join(["E" + words[0], *words[1:-1], words[-1] + "L"])


def main() -> None:
    """Parse the command line and measure, or be one of the measuring processes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="qwen3_1p7b")
    parser.add_argument("--gpus", type=int, help="all that are found, unless given")
    parser.add_argument("--layouts", nargs="+", help=f"of {', '.join(all_layouts_names())}")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="sequences a step of the baseline")
    parser.add_argument("--steps", type=int, default=3, help="measured, of each global batch")
    parser.add_argument("--limit", type=int, default=100, help="seconds a measurement")
    parser.add_argument("--logs", type=Path, help="folder; not kept, unless given")
    parser.add_argument("--traces", type=Path, help="folder for rank 0's profiled steps")
    parser.add_argument("--output", type=Path, default=Path("scaling.jsonl"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
    elif args.logs:
        measure_all(args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            args.logs = Path(folder)
            measure_all(args)


def all_layouts_names() -> list[str]:
    """Return the names of all layouts."""
    return list(all_layouts(load_params("qwen3_1p7b").model))


def measure_all(args: argparse.Namespace) -> None:
    """Measure all layouts and print their table."""
    gpus = args.gpus or ranks.num_gpus()
    if not gpus:
        sys.exit("there is no GPU; --gpus 2 --model toy tries this program on a CPU")
    known = all_layouts(load_params(args.model).model)
    names = args.layouts or [name for name in STANDARD if known[name].fits(gpus)]
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"there is no layout {unknown[0]!r}; there are {', '.join(known)}")
    print("| layout | GPUs | micro-batch | global batch | tokens/s a GPU | efficiency ", end="")
    print("| step, s | peak GiB | exposed | busy comm. | loss | started after | GB/s |")
    print("|---" * 13 + "|", flush=True)
    baseline = 0.0
    for folder in filter(None, (args.output.parent, args.traces)):
        folder.mkdir(parents=True, exist_ok=True)
    with args.output.open("w") as out:
        for name in names:
            results = measure(args, name, known[name], gpus)
            if name == BASELINE:
                rates = [r["rows"][0]["rate"] for r in results if "error" not in r]
                baseline = statistics.mean(rates) if rates else 0.0
            for result in results:
                print(json.dumps(result), file=out, flush=True)
                for line in table_rows(result, baseline):
                    print(line, flush=True)


def measure(args: argparse.Namespace, name: str, layout: Layout, gpus: int) -> list[dict[str, Any]]:
    """Measure a layout on all GPUs, or one that needs a single GPU on each by itself."""
    command = [sys.executable, __file__, "--worker", name, "--gpus", str(gpus)]
    for option in ("model", "batch", "steps"):
        command += [f"--{option}", str(getattr(args, option))]
    command += ["--traces", str(args.traces)] if args.traces else []
    command += ["--micro-batch", str(max(1, round(args.micro_batch * layout.micro_batch_factor)))]
    alone = name.startswith(BASELINE)
    size = 1 if alone else gpus
    jobs = [
        ranks.Job(f"{name} on {i}", command, size, i, dict(layout.environment))
        for i in range(gpus if alone else 1)
    ]
    found = ranks.run(jobs, args.logs, args.limit)
    label = name if alone or size == 2 or name == "TP 2 PP 2" else f"{name}, {gpus} GPUs"
    results = []
    for i, answer in enumerate(found):
        result = {"layout": f"{label}, card {i}" if alone else label, "gpus": size}
        if isinstance(answer, ranks.Failed):
            results.append({**result, "error": str(answer)})
        else:
            results.append({**result, **together(answer)})
    return results


def together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Put the results of the ranks together: means of the times, the highest memory."""
    rows = []
    for row in zip(*(answer["rows"] for answer in answers), strict=True):
        seconds = statistics.mean(part["seconds"] for part in row)
        rate = row[0]["tokens"] / seconds / len(answers)
        rows.append({**row[0], "seconds": seconds, "rate": rate})
    losses = [answer["loss"] for answer in answers if answer["loss"] is not None]
    return {
        "rows": rows,
        "micro_batch": answers[0]["micro_batch"],
        "peak_gib": [answer["peak_gib"] for answer in answers],
        "exposed": statistics.mean(answer["exposed"] for answer in answers),
        "communication": statistics.mean(answer["communication"] for answer in answers),
        "busy": [answer["busy"] for answer in answers],
        "start": max(answer["start"] for answer in answers),
        "bandwidth": answers[0]["bandwidth"],
        "loss": losses[0] if losses else None,
        "steps": [answer["steps"] for answer in answers],
    }


def table_rows(result: dict[str, Any], baseline: float) -> Iterator[str]:
    """Return the lines of the table for a layout, one a global batch."""
    head = f"| {result['layout']} | {result['gpus']} |"
    if "error" in result:
        yield f"{head} {result['error']} |"
        return
    for row in result["rows"]:
        efficiency = f"{100 * row['rate'] / baseline:.1f}%" if baseline else ""
        yield (
            f"{head} {result['micro_batch']} | {row['batch']} | {row['rate']:.0f} | {efficiency} "
            f"| {row['seconds']:.3f} | {max(result['peak_gib']):.1f} "
            f"| {100 * result['exposed']:.1f}% | {100 * result['communication']:.1f}% "
            f"| {result['loss']:.4f} | {result['start']:.0f} s "
            f"| {result['bandwidth'] or 0:.0f} |"
        )


# ---- in the measuring processes ----


def make_stopwatch(steps: int, trace_to: Path | None = None) -> Any:
    """Return a stopwatch that times so many steps and looks into one more.

    With ``trace_to`` that step is written there for Perfetto, with what the processor did.
    """
    import torch
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training import get_args
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    from kaiyuan.megatron import cpu, measure

    class Stopwatch(measure.Stopwatch):
        began = 0.0  # when the first step did
        details: dict[str, Any]

        def __init__(self) -> None:
            super().__init__(0)
            self.samples: list[int] = []  # of each step

        def steps_to_measure(self) -> int:
            return int(get_args().train_iters) - measure.WARM_UP

        def timed(self, *args: Any, **kwargs: Any) -> Any:
            self.began = self.began or time.perf_counter()
            self.samples.append(get_current_global_batch_size())
            if len(self.ends) < steps:
                return super().timed(*args, **kwargs)
            on_cpu = cpu.is_active()
            activities = {ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA}
            activities |= {ProfilerActivity.CPU} if trace_to else set()
            torch.cuda.synchronize()
            with profile(activities=activities) as profiler:
                start = time.perf_counter()
                out = self.step(*args, **kwargs)
                torch.cuda.synchronize()
                wall = time.perf_counter() - start
            if trace_to:
                profiler.export_chrome_trace(str(trace_to))
            kind = DeviceType.CPU if on_cpu else DeviceType.CUDA
            events = profiler.profiler.kineto_results.events()
            self.details = shares([e for e in events if e.device_type() == kind], wall)
            return out

        def times(self) -> list[float]:
            """Return how long each step took, but for the first and the profiled one."""
            torch.cuda.synchronize()
            return [measure.between(*pair) for pair in pairwise(self.ends)]

    return Stopwatch()


def shares(events: Any, wall: float) -> dict[str, Any]:
    """Return what the work of a profiled step that took ``wall`` seconds says."""
    summary = trace.summarize(
        [
            (e.name(), e.start_ns() / 1e9, (e.start_ns() + e.duration_ns()) / 1e9, 0)
            for e in events
            if not e.name().startswith("ProfilerStep")
        ]
    )
    return {
        "exposed": summary.exposed_communication / wall,
        "communication": summary.communication / wall,
        "busy": {**summary.busy, "idle": wall - summary.span + summary.idle, "wall": wall},
        "bandwidth": bandwidth(),
    }


def bandwidth() -> float | None:
    """Return what each rank receives while all gather a large tensor, in GB/s; None for one."""
    import torch

    from kaiyuan.megatron import cpu

    ranks_in_all = torch.distributed.get_world_size()
    if ranks_in_all == 1:
        return None
    part = torch.zeros(2**20 if cpu.is_active() else 2**28, dtype=torch.uint8, device="cuda")
    whole = part.new_empty(ranks_in_all * part.numel())
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.distributed.all_gather_into_tensor(whole, part)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return (ranks_in_all - 1) * part.numel() / min(seconds) / 1e9


def work(args: argparse.Namespace) -> None:
    """Train for a few steps as one rank and say how long they took."""
    began = time.perf_counter()
    import torch

    from kaiyuan.megatron import measure, overlap, pretrain

    layout = all_layouts(load_params(args.model).model)[args.worker]
    if layout.plain:
        overlap.install = lambda: None
    batches = [args.batch]
    if not args.worker.startswith(BASELINE):
        batches.append(args.batch * args.gpus)
    steps = WARM_UP + args.steps  # of each global batch
    name = args.worker.replace(" ", "-") + ".json.gz"
    trace_to = args.traces / name if args.traces else None
    first = not int(os.environ["RANK"])
    watch = make_stopwatch(steps * len(batches), trace_to if first else None)
    pretrain.provide_datasets = measure.provide_random  # type: ignore[assignment]
    watch.install()
    pretrain.run(arguments(args, layout, batches, steps))
    seconds = watch.times()  # without the first step
    length = load_params(args.model).model["seq_length"]
    rows = []
    for i, batch in enumerate(batches):
        part = seconds[i * steps + WARM_UP - 1 : (i + 1) * steps - 1]
        assert set(watch.samples[i * steps : (i + 1) * steps]) == {batch}
        rows.append({"batch": batch, "tokens": batch * length, "seconds": statistics.median(part)})
    ranks.say(
        {
            "rows": rows,
            "micro_batch": args.micro_batch,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
            "loss": None if watch.loss is None else float(watch.loss.flatten()[0]),
            "start": watch.began - began,
            "steps": seconds,
            **watch.details,
        }
    )


def arguments(
    args: argparse.Namespace, layout: Layout, batches: list[int], steps: int
) -> list[str]:
    """Return Megatron's command line: so many steps of each global batch, and one of the last."""
    common = argparse.Namespace(
        worker="ours",
        models=[args.model],
        micro_batches=[args.micro_batch],
        global_batch=batches[0],
        steps=0,
        profile=False,
    )
    argv = [*bench.megatron_arguments(common, []), *layout.argv(), "--num-workers=1"]
    if len(batches) == 1:
        return [*argv, f"--train-iters={steps + 1}"]  # the last one counts
    for name in ("--global-batch-size", "--train-iters"):
        place = argv.index(name)
        del argv[place : place + 2]
    length = load_params(args.model).model["seq_length"]
    first, then = batches
    schedule = f"0:{first} {first * steps * length}:{then}"
    samples = first * steps + then * (steps + 1)
    return [*argv, "--step-batch-size-schedule", schedule, "--train-samples", str(samples)]


if __name__ == "__main__":
    main()
