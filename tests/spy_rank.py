"""kaiyuan.rank, which also notes the samples that reach the model, and can spoil a step.

KAIYUAN_SPY: folder that gets a file a rank, with a line a micro-batch.
KAIYUAN_SPOIL: "nan STEP" or "jump STEP": what happens to the loss of that step.
"""

import hashlib
import os
from pathlib import Path

from kaiyuan import rank


def install() -> None:
    from kaiyuan.megatron import pretrain  # before Megatron itself: it readies the machine

    forward = pretrain.forward_step
    from megatron.core import parallel_state
    from megatron.training import get_args

    spoil, step = (os.environ.get("KAIYUAN_SPOIL") or "nothing 0").split()
    seen: dict[tuple[int, int], int] = {}

    def forward_step(batches, model):
        iteration = get_args().curr_iteration + 1
        # Each virtual stage of a pipeline sees all micro-batches.
        number = seen[iteration, id(model)] = seen.get((iteration, id(model)), -1) + 1

        def tapped(tokens, *args, **kwargs):
            samples = tokens.reshape(-1, get_args().seq_length).cpu()
            rows = [hashlib.md5(row.numpy().tobytes()).hexdigest() for row in samples]
            place = parallel_state.get_data_parallel_rank()
            with Path(os.environ["KAIYUAN_SPY"], f"{get_args().rank}.txt").open("a") as out:
                print(iteration, number, place, *rows, file=out)
            return model(tokens, *args, **kwargs)

        losses, function = forward(batches, tapped if "KAIYUAN_SPY" in os.environ else model)
        if iteration == int(step):
            losses = losses * float("nan") if spoil == "nan" else losses * 3
        return losses, function

    pretrain.forward_step = forward_step


if __name__ == "__main__":
    install()
    rank.main()
