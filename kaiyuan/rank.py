"""One process of a training; started by ``kaiyuan train`` for each rank and phase.

    python -m kaiyuan.rank --num-layers 28 ... --data-path data/phase1

It imports nothing heavy at its top: Megatron's checkpoint writer spawns a helper process, which
loads this module again.
"""

import os
import sys
import traceback

from kaiyuan.errors import UserError

# The launcher shows lines with these marks; all others go to the log only.
MARK = "[kaiyuan] "
ERROR_MARK = MARK + "error: "


def main() -> None:
    """Train; a UserError becomes one marked line and exit code 2."""
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
        # Not sys.exit: other ranks may wait in a collective that will never come.
        os._exit(2)
    except Exception:
        story = traceback.format_exc()
        print(f"{story}\n{ERROR_MARK}{_reason(story)}", flush=True)
        os._exit(1)


def _reason(story: str) -> str:
    """Return a traceback in one sentence."""
    if any(text in story for text in ("No space left on device", "File too large", "Disk quota")):
        return (
            "the disk is full: make room and give the same command again, which goes on from the "
            "last complete checkpoint"
        )
    return "Megatron failed: " + story.strip().splitlines()[-1]


if __name__ == "__main__":
    main()
