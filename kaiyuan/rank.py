"""One process of a training; started by ``kaiyuan train`` for each rank and phase.

    python -m kaiyuan.rank --num-layers 28 ... --data-path data/phase1

It imports nothing heavy at its top, because the launcher takes its marks from here.
"""

import multiprocessing
import os
import signal
import sys
import traceback
from typing import NoReturn

from kaiyuan.errors import UserError

# The launcher shows lines with these marks; all others go to the log only.
MARK = "[kaiyuan] "
ERROR_MARK = MARK + "error: "
# What follows is a step in JSON, which the launcher shows as it can; see kaiyuan/live.py.
STEP_MARK = MARK + "step: "

# Megatron's exit codes where a loss or gradient was no finite number, after it computed the step
# again: "start once more, to see whether the GPU is at fault" and "it is not".
_NOT_FINITE = (16, 17)


def main() -> None:
    """Train; a UserError becomes one marked line and exit code 2."""
    # Inherited from torchrun, which has to ignore it; Megatron's own handler comes later.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # As torchrun sets them; a single process needs no torchrun.
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in single.items():
        os.environ.setdefault(name, value)
    # Tensor parallelism overlaps communication and computation only with a single hardware queue;
    # Megatron asserts it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    try:
        from kaiyuan.megatron.pretrain import run

        run(sys.argv[1:])
    except UserError as error:
        print(f"{ERROR_MARK}{error}", flush=True)
        _leave(2)
    except SystemExit as end:
        if end.code in _NOT_FINITE:
            print(f"{ERROR_MARK}{_not_finite()}", flush=True)
        raise
    except BaseException:  # torch's CheckpointException is no Exception
        story = traceback.format_exc()
        print(f"{story}\n{ERROR_MARK}{_reason(story)}", flush=True)
        _leave(1)


def _leave(code: int) -> NoReturn:
    """End at once: other ranks may wait in a collective that will never come."""
    for child in multiprocessing.active_children():  # loader workers
        child.kill()
    os._exit(code)


def _reason(story: str) -> str:
    """Return a traceback in one sentence."""
    last = story.strip().splitlines()[-1]
    # Megatron's writer does not pass on why a write failed.
    full = ("Worker failure", "No space left on device", "File too large", "Disk quota")
    if any(text in story for text in full):
        return (
            "a checkpoint could not be written, most likely because the disk is full: make room "
            "and give the same command again, which goes on from the last complete checkpoint"
        )
    if "CheckpointException" in story:
        return f"the checkpoint could not be loaded: {last}"
    if "assert len(steps) == 1" in story:
        # The optimizer's state has no step number yet, and Megatron's writer asks for it.
        return (
            "nothing can be saved, because all steps so far were skipped: in fp16 a step with a "
            "gradient that is not finite is not taken; give a lower initial_loss_scale, such as "
            "65536, or train longer before the first save"
        )
    if "Unexpected result" in story:
        return _not_finite()
    return f"Megatron failed: {last}"


def _not_finite() -> str:
    from megatron.training import get_args

    step = get_args().curr_iteration + 1
    return (
        f"the loss or a gradient of step {step} is not a finite number; the step was not taken. "
        "The same command computes it again, best on another GPU; to leave its data out, add "
        f"iterations_to_skip=[{step}] rerun_mode=disabled"
    )


if __name__ == "__main__":
    main()
