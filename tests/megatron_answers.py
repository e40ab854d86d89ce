"""Run in a process of its own: what Megatron itself says of our arguments.

python -m tests.megatron_answers parse < questions.json
python -m tests.megatron_answers options
python -m tests.megatron_answers rates < schedules.json
"""

import contextlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any


def parse(questions: list[tuple[int, list[str]]]) -> list[dict[str, Any]]:
    """Return what Megatron's parser makes of each number of processes and command line."""
    from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
    from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
    from megatron.training.global_vars import destroy_global_vars

    from kaiyuan.megatron import arguments

    answers = []
    for world_size, argv in questions:
        os.environ["WORLD_SIZE"] = str(world_size)
        destroy_global_vars()
        destroy_num_microbatches_calculator()
        args = arguments.parse(argv)
        answer = {k: v for k, v in vars(args).items() if isinstance(v, str | int | float | None)}
        answer["padded_vocab_size"] = vocab_size_with_padding(args.vocab_size, args, False)
        answers.append(answer)
    return answers


def options(_: Any) -> dict[str, str]:
    """Return the names of all options of Megatron's parser."""
    from kaiyuan.megatron import arguments

    return arguments.option_names()


def rates(schedules: list[dict[str, Any]]) -> list[float]:
    """Return the learning rate of Megatron's scheduler after so many samples."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    import kaiyuan.megatron  # noqa: F401

    answers = []
    for schedule in schedules:
        done = schedule.pop("done")
        group: dict[str, Any] = {}
        scheduler = OptimizerParamScheduler(
            SimpleNamespace(param_groups=[group]),
            init_lr=0.0,
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=1,
            wd_incr_style="constant",
            **schedule,
        )
        scheduler.step(done)
        answers.append(group["lr"])
    return answers


def _model(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Return a model with our layers, in fp32 on the CPU, and its parsed arguments."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.training.argument_utils import gpt_config_from_args

    from kaiyuan.config import to_argv
    from kaiyuan.megatron import arguments as parser
    from kaiyuan.megatron import layers

    argv = [*to_argv(arguments), "--train-samples=1000", "--lr-decay-samples=1000"]
    args = parser.parse([*parser.CPU_ARGUMENTS, *argv])
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    config = gpt_config_from_args(args)
    model = GPTModel(
        config.transformer,
        layers.block_spec(config),
        vocab_size=args.vocab_size,
        max_sequence_length=args.seq_length,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    args.padded_vocab_size = args.vocab_size
    return model, args


def flops(arguments: dict[str, Any]) -> dict[str, float]:
    """Return the operations for a token, as torch sees them and as Megatron's formula has them."""
    import torch
    from megatron.training.training import num_floating_point_operations
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model, args = _model(arguments)
    ids = torch.arange(args.seq_length)[None] % args.vocab_size
    # The counter knows attention as matrix products; it has no entry for the CPU's fused kernel.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(ids, ids, None, labels=ids).sum().backward()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "torch_count": counter.get_total_flops() / args.seq_length,
        "megatron_count": num_floating_point_operations(args, 1) / args.seq_length,
    }


def documents(arguments: dict[str, Any]) -> dict[str, list[float]]:
    """Return the losses of two samples of two documents each, by forward_step and one by one.

    In Triton's interpreter the kernel for queries, keys and values is used.
    """
    import torch

    from kaiyuan.megatron import layers, pretrain

    if os.environ.get("TRITON_INTERPRET"):
        layers.SelfAttention._is_plain = lambda *_: True
    model, args = _model(arguments)
    length = args.seq_length
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(args.vocab_size, (2, length + 1), generator=generator)
    cuts = (100, 17)
    positions = torch.stack([torch.cat([torch.arange(c), torch.arange(length - c)]) for c in cuts])
    batch = {
        "tokens": ids[:, :-1],
        "labels": ids[:, 1:],
        "position_ids": positions,
        "loss_mask": torch.ones(2, length),
    }
    together, _ = pretrain.forward_step(iter([batch]), model)
    args.reset_attention_mask = False
    alone = []
    for row, cut in enumerate(cuts):
        for part in (slice(0, cut), slice(cut, length)):
            one = {name: value[row : row + 1, part] for name, value in batch.items()}
            losses, _ = pretrain.forward_step(iter([one]), model)
            alone += losses.flatten().tolist()
    mixed, _ = pretrain.forward_step(iter([batch]), model)
    return {
        "together": together.flatten().tolist(),
        "alone": alone,
        "mixed": mixed.flatten().tolist(),
    }


def main() -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    verb = {
        "parse": parse,
        "options": options,
        "rates": rates,
        "flops": flops,
        "documents": documents,
    }[sys.argv[1]]
    question = json.loads(sys.stdin.read() or "null")
    with contextlib.redirect_stdout(sys.stderr):
        answer = verb(question)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
