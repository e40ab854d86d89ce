"""What TensorBoard's events hold beside that which loss.csv has: memory, loss scale, timers."""

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kaiyuan.report.run import Array

# In loss.csv too, the same by samples instead of steps, or no numbers.
_KNOWN = re.compile(
    b"kaiyuan/| vs samples|/text_summary|lm loss|learning-rate|grad-norm|batch-size|world-size"
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
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError:
        return {}
    series: dict[str, dict[int, float]] = {}
    # Names begin with the time at which they were opened.
    for path in sorted(folder.glob("events.out.tfevents.*"), key=lambda path: path.name):
        for raw in _records(path.read_bytes()):
            if _KNOWN.search(raw):
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


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the records of an event file, up to one that is still being written.

    TensorFlow's format: length (uint64, little-endian), 4 bytes, the record, 4 bytes of checksum.
    Tensorboard's own reader takes a minute for the 3.7 million events of a run of 262,000 steps,
    of which hardly any are wanted.
    """
    place = 0
    while place + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        end = place + 12 + length
        if end + 4 > len(content):
            return
        yield content[place + 12 : end]
        place = end + 4
