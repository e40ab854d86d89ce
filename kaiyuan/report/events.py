"""What TensorBoard's events hold beside that which loss.csv has: memory, loss scale, timers."""

from pathlib import Path

import numpy as np

from kaiyuan.report.run import Array

# In loss.csv too, the same by samples instead of steps, or no numbers.
_KNOWN = (
    *(b"kaiyuan/", b" vs samples", b"/text_summary"),
    *(b"lm loss", b"learning-rate", b"grad-norm", b"batch-size", b"world-size"),
)
_MOST = 12


def further_series(folder: Path, last_step: int) -> dict[str, tuple[Array, Array]]:
    """Return steps and values of the scalars that loss.csv does not have.

    Args:
        folder: of TensorBoard's event files.
        last_step: of the run as it is now; what a killed process did beyond it is left out, and
            of a step that was done again the last value counts.

    Returns:
        By tag; those that never change are left out, and all where tensorboard is not installed.
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        return {}
    series: dict[str, dict[int, float]] = {}
    # Names begin with the time at which they were opened.
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.name):
        for raw in RawEventFileLoader(str(path)).Load():
            # A step has a dozen events; reading them all would take a minute for a long run.
            if any(name in raw for name in _KNOWN):
                continue
            event = Event.FromString(raw)
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value" and event.step <= last_step:
                    series.setdefault(value.tag, {})[event.step] = value.simple_value
    result: dict[str, tuple[Array, Array]] = {}
    for tag, values in sorted(series.items()):
        steps = np.array(sorted(values))
        numbers = np.array([values[step] for step in steps.tolist()])
        if len(np.unique(numbers)) > 1 and len(result) < _MOST:
            result[tag] = (steps, numbers)
    return result
