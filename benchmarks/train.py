"""Measure a training step: our layers against Megatron's own and against TransformerEngine's.

    python benchmarks/train.py --models qwen3_1p7b gpt_smoke --micro-batches 1 2 4 8
    python benchmarks/train.py --paths ours te --micro-batches 4 --te-path /opt/te --profile

Needs one CUDA device. Every measurement is a process of its own, one after another, on tokens
drawn at random; the last rows are repeated at the end with --repeat, to show the spread. The paths:

    ours        our layers; TransformerEngine is kept off the path
    ours+te     the same with TransformerEngine on the path, unused
    ours-te     our entry point with transformer_impl: transformer_engine
    te          Megatron with TransformerEngine and its RoPE fusion
    te+ce       the same with Megatron's fused cross-entropy; it refuses TransformerEngine's
    stock       Megatron's own layers (transformer_impl: local)
    plain       our layers as plain PyTorch operations, which the fused ones are held against

--te-path is the folder with TransformerEngine, where it is not installed in the environment.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATASHEET_TFLOPS = {"H200": 989.0, "H100": 989.0, "A100": 312.0, "B200": 2250.0}
RESULT = "RESULT "
TE_PATHS = ("ours+te", "ours-te", "te", "te+ce")


def main() -> None:
    """Parse the command line and measure, or be one of the measuring processes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["qwen3_1p7b"])
    parser.add_argument("--paths", nargs="+", default=["ours", "te", "te+ce", "stock"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6, help="measured, after three that are not")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--te-path", default="")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--limit", type=int, default=240, help="seconds a measurement")
    parser.add_argument("--output", type=Path, help="JSON, one line a measurement")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args, extra = parser.parse_known_args()
    if args.worker:
        work(args, extra)
    else:
        measure_all(args, extra)


def measure_all(args: argparse.Namespace, extra: list[str]) -> None:
    """Run all measurements and print their table."""
    gemm = run_worker(args, "gemm", args.models[0], 0, [])
    print(f"{gemm.get('device')}: bf16 product of 8192^3 at {gemm.get('tflops', 0):.0f} TFLOP/s")
    results = []
    print("| model | path | micro-batch | TFLOP/s | tokens/s | MFU | of the GEMM | GiB | loss |")
    print("|---|---|---|---|---|---|---|---|---|")
    for _ in range(args.repeat):
        for model in args.models:
            for path in args.paths:
                for micro_batch in args.micro_batches:
                    result = run_worker(args, path, model, micro_batch, extra)
                    results.append(result)
                    print(table_row(result, gemm), flush=True)
    if args.output:
        args.output.write_text("".join(json.dumps(r) + "\n" for r in [gemm, *results]))
    for result in results:
        if "profile" in result:
            print_profile(result)


def run_worker(
    args: argparse.Namespace, path: str, model: str, micro_batch: int, extra: list[str]
) -> dict[str, Any]:
    """Measure in a process of its own; a failure is a result, too."""
    command = [sys.executable, __file__, "--worker", path, "--models", model]
    command += ["--micro-batches", str(micro_batch), "--steps", str(args.steps)]
    command += ["--global-batch", str(args.global_batch)] + ["--profile"] * args.profile + extra
    environment = os.environ | single_process()
    if path in TE_PATHS and args.te_path:
        environment["PYTHONPATH"] = f"{args.te_path}:{environment['PYTHONPATH']}"
    result = {"path": path, "model": model, "micro_batch": micro_batch}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=args.limit
        )
    except subprocess.TimeoutExpired:
        return {**result, "error": f"more than {args.limit} s"}
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return {**result, **json.loads(line.removeprefix(RESULT))}
    lines = [x for x in done.stderr.splitlines() if re.match(r"\S*(Error|Exception)\b", x)]
    print("\n".join(done.stderr.splitlines()[-25:]), file=sys.stderr)
    return {**result, "error": lines[-1][:150] if lines else f"exit code {done.returncode}"}


def single_process(number: int = 0) -> dict[str, str]:
    """Return the environment of a training in one process; ``number`` tells it from others."""
    python_path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        "PYTHONPATH": ":".join(filter(None, python_path)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + (os.getpid() + number) % 20000),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def table_row(result: dict[str, Any], gemm: dict[str, Any]) -> str:
    """Return one line of the table."""
    start = f"| {result['model']} | {result['path']} | {result['micro_batch']} |"
    if "error" in result:
        return f"{start} {result['error']} |"
    sheet = next((v for k, v in DATASHEET_TFLOPS.items() if k in gemm.get("device", "")), 0.0)
    rate = result["tflops"]
    shares = [f"{100 * rate / peak:.1f}%" if peak else "" for peak in (sheet, gemm.get("tflops"))]
    return (
        f"{start} {rate:.1f} | {result['tokens_per_second']:.0f} | {shares[0]} | {shares[1]} "
        f"| {result['peak_gib']:.1f} | {result['loss']:.4f} |"
    )


def print_profile(result: dict[str, Any]) -> None:
    """Print where the milliseconds of a step went."""
    print(f"\n{result['model']} {result['path']} micro-batch {result['micro_batch']}: ms a step")
    for kind, ms in sorted(result["profile"].items(), key=lambda item: -item[1]):
        print(f"  {kind:24} {ms:8.1f}")
    for name, ms, count in result["kernels"]:
        print(f"    {ms:8.1f} {count:6} {name}")


# ---- in the measuring process ----


def work(args: argparse.Namespace, extra: list[str]) -> None:
    """Measure one thing and print it."""
    if args.worker == "gemm":
        print(RESULT + json.dumps(measure_gemm()))
        return
    from kaiyuan.megatron import measure, mends

    watch = stopwatch(args.steps, args.profile)
    argv = megatron_arguments(args, extra)
    if args.worker == "plain":
        use_plain_operations()
    if args.worker.startswith("ours") or args.worker == "plain":
        from kaiyuan.megatron import pretrain

        pretrain.provide_datasets = measure.provide_random  # type: ignore[assignment]
        watch.install()
        pretrain.run(argv)
    else:
        mends.dataset_utils.compile_helpers = lambda: None
        watch.install()
        run_megatron(argv)
    print(RESULT + json.dumps(watch.rates()), flush=True)


def use_plain_operations() -> None:
    """Take every kernel out of our layers, and the replacements of Megatron's fallbacks."""
    import torch
    import torch.nn.functional as F
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.mlp import MLP

    from kaiyuan.megatron import fallbacks, layers, loss

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def cross_entropy(
        logits: torch.Tensor, labels: torch.Tensor, _: Any, cap: float | None = None
    ) -> torch.Tensor:
        rows = logits.flatten(0, -2).float()
        if cap is not None:
            rows = loss.soft_cap(rows, cap)
        return F.cross_entropy(rows, labels.flatten(), reduction="none").view(labels.shape)

    layers.RMSNorm.forward = layers.ResidualRMSNorm.forward = norm  # type: ignore[method-assign]
    layers.SelfAttention.forward = SelfAttention.forward  # type: ignore[method-assign]
    layers.MLP.forward = MLP.forward  # type: ignore[method-assign]
    loss.cross_entropy = cross_entropy
    fallbacks.install = lambda: None


def measure_gemm() -> dict[str, Any]:
    """Return the rate of a large bf16 product of random matrices, the median of 20."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(23):
        torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    rate = 2 * 8192**3 / statistics.median(seconds[3:]) / 1e12
    return {"device": torch.cuda.get_device_name(), "tflops": rate}


def megatron_arguments(args: argparse.Namespace, extra: list[str]) -> list[str]:
    """Return the command line of Megatron for a path."""
    from kaiyuan.config import load_params, to_argv

    params = load_params(args.models[0])
    model = {**params.model}
    path = args.worker
    if path in ("te", "te+ce", "ours-te"):
        model["transformer_impl"] = "transformer_engine"
        model["no_rope_fusion"] = False
    if not path.startswith("ours"):
        model["no_gradient_accumulation_fusion"] = True  # asks for Apex
    if path == "stock":
        model["no_masked_softmax_fusion"] = True  # so does this
    if path == "te+ce":
        model |= {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
    if path == "plain":
        model |= {"no_bias_swiglu_fusion": True, "no_bias_dropout_fusion": True}
    fp16 = {"fp16", "initial_loss_scale", "accumulate_allreduce_grads_in_fp32"}
    hparams = {k: v for k, v in params.hparams.items() if k in fp16} or {"bf16": True}
    hparams |= {
        "micro_batch_size": args.micro_batches[0],
        "global_batch_size": args.global_batch,
        "train_iters": args.steps + 3 + args.profile,
        "lr": 1e-4,
        "min_lr": 1e-5,
        "lr_decay_style": "cosine",
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "eval_iters": 0,
        "eval_interval": 100000,
        "log_interval": 1000,
        "num_workers": 2,
        "use_distributed_optimizer": True,
        "data_path": "none",
    }
    return [*to_argv({**model, **hparams}), *extra]


def stopwatch(steps: int, profile: bool) -> Any:
    """Return a stopwatch for a fixed number of steps, and one more to look into if asked to."""
    import torch
    from megatron.training import get_args
    from megatron.training.training import num_floating_point_operations
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    from kaiyuan.megatron import measure
    from kaiyuan.profiling.trace import kind_of

    class Watch(measure.Stopwatch):
        details: dict[str, Any]

        def steps_to_measure(self) -> int:
            return steps + profile

        def timed(self, *args: Any, **kwargs: Any) -> Any:
            if not profile or len(self.ends) < measure.WARM_UP + steps:
                return super().timed(*args, **kwargs)
            torch.cuda.synchronize()
            with record(activities=[ProfilerActivity.CUDA]) as profiler:
                start = time.perf_counter()
                out = self.step(*args, **kwargs)
                torch.cuda.synchronize()
                wall = time.perf_counter() - start
            self.details = by_kind(profiler.key_averages(), wall)
            return out

        def rates(self) -> dict[str, Any]:
            """Return the median of the measured steps as rates."""
            args, result = get_args(), self.result()
            seconds = statistics.median(result["steps"])
            flops = num_floating_point_operations(args, args.global_batch_size)
            return {
                "seconds": [round(s, 4) for s in result["steps"]],
                "tflops": flops / seconds / 1e12,
                "tokens_per_second": args.global_batch_size * args.seq_length / seconds,
                "loss": result["loss"],
                "peak_gib": result["memory"]["allocated"] / 2**30,
                **self.details,
            }

    def by_kind(averages: Any, wall: float) -> dict[str, Any]:
        events = [(e.key, e.self_device_time_total / 1e3, e.count) for e in averages]
        kinds: dict[str, float] = {}
        for name, ms, _ in events:
            kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + ms
        kinds["idle"] = wall * 1e3 - sum(kinds.values())
        top = sorted(events, key=lambda event: -event[1])[:45]
        return {"profile": kinds, "kernels": [(n[:130], ms, c) for n, ms, c in top]}

    watch = Watch(0)
    watch.details = {}
    return watch


def run_megatron(argv: list[str]) -> None:
    """Train as Megatron does by itself."""
    import torch
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    from kaiyuan.megatron import arguments, measure
    from kaiyuan.megatron.pretrain import loss_function

    args = arguments.parse(argv)
    mask = None
    if args.transformer_impl == "local":
        size = args.seq_length
        mask = torch.ones(1, 1, size, size, dtype=torch.bool, device="cuda").triu(1)

    def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        batch = {name: x.cuda(non_blocking=True) for name, x in next(batches).items()}
        losses = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
        return losses, lambda losses: loss_function(batch["loss_mask"], losses)

    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, measure.provide_random, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
