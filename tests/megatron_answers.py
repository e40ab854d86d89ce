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
    import kaiyuan.megatron  # noqa: F401
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

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


def main() -> None:
    os.environ |= {"RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    verb = {"parse": parse, "options": options, "rates": rates}[sys.argv[1]]
    question = json.loads(sys.stdin.read() or "null")
    with contextlib.redirect_stdout(sys.stderr):
        answer = verb(question)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
