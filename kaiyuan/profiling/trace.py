"""What a trace of torch's profiler says: time by kind of work, exposed communication, idle time.

Everything is computed on intervals, so that work which overlaps on several streams counts once.
Neither torch nor Megatron is needed.
"""

import dataclasses
import gzip
import json
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kaiyuan.errors import UserError

COMMUNICATION = "communication"
REST = "the rest"
# Kinds of work by the name of a kernel, or of an operation on a CPU; the first that fits decides.
KINDS = {
    COMMUNICATION: r"nccl|gloo:|all_?reduce|all_?gather|reduce_?scatter|c10d::",
    "attention": r"sdpa|flash|fmha|attention|attn",
    "matrix products": r"gemm|gemv|nvjet|wgmma|cublas|aten::(?:add|b)?mm\b|matmul",
    "norms": r"rms_?norm|layer_?norm",
    "SwiGLU": r"swiglu|silu",
    "queries, keys, RoPE": r"queries_keys|rotary|rope",
    "loss": r"^_(?:loss|forward|backward)|cross_entropy|softmax|nll_loss",
    "optimizer": r"adam|multi_tensor|lpnorm|foreach|vector_norm",
    "embedding": r"embedding|index",
    "copies and fills": r"copy|fill|zero|memcpy|memset|cat",
    "additions and sums": r"add|mul|reduce|sum|elementwise",
}
# What the profiler calls work on the device.
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NUM_GAPS = 10

Interval = tuple[float, float]


class Slice(NamedTuple):
    """One piece of work.

    Attributes:
        name: of the kernel.
        start: seconds.
        end: seconds.
        stream: on which it ran; work of one stream does not overlap.
    """

    name: str
    start: float
    end: float
    stream: int | str = 0


class Gap(NamedTuple):
    """A time in which nothing ran: seconds, and the work before and after it."""

    start: float
    seconds: float
    before: str
    after: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """Where the time between the first and the last piece of work went, in seconds.

    Attributes:
        span: from the start of the first to the end of the last.
        busy: by kind, the time in which work of the kind ran; kinds that overlap each count.
        communication: time in which a communication kernel ran.
        exposed_communication: of that, the part in which nothing else ran.
        idle: time in which nothing ran at all.
        gaps: the longest idle times, longest first.
    """

    span: float
    busy: dict[str, float]
    communication: float
    exposed_communication: float
    idle: float
    gaps: tuple[Gap, ...]

    @property
    def exposed_share(self) -> float:
        """Return the share of the span that exposed communication takes."""
        return self.exposed_communication / self.span if self.span else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        gaps = [gap._asdict() for gap in self.gaps]
        return {**dataclasses.asdict(self), "gaps": gaps, "exposed_share": self.exposed_share}


def kind_of(name: str) -> str:
    """Return the kind of work that a kernel does, by its name."""
    found = (kind for kind, text in KINDS.items() if re.search(text, name, re.IGNORECASE))
    return next(found, REST)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover what the given ones cover together."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def difference(these: Iterable[Interval], those: Iterable[Interval]) -> list[Interval]:
    """Return what the first intervals cover and the second ones do not."""
    left: list[Interval] = []
    holes = union(those)
    first = 0
    for start, end in union(these):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        position = start
        for hole in holes[first:]:
            if hole[0] >= end:
                break
            if hole[0] > position:
                left.append((position, hole[0]))
            position = max(position, hole[1])
        if position < end:
            left.append((position, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def summarize(trace: Path | Sequence[Slice | tuple[str, float, float, int]]) -> Summary:
    """Summarize a trace.

    Args:
        trace: file that torch's profiler wrote (Chrome's format, JSON or gzipped JSON), or pieces
            of work as (name, start, end, stream), in seconds.

    Raises:
        UserError: the file cannot be read, or there is no work in it.
    """
    slices = read_trace(trace) if isinstance(trace, Path) else [Slice(*piece) for piece in trace]
    if not slices:
        raise UserError(f"there is no work in the trace {trace}")
    by_kind: dict[str, list[Interval]] = {}
    for piece in slices:
        by_kind.setdefault(kind_of(piece.name), []).append((piece.start, piece.end))
    communication = union(by_kind.get(COMMUNICATION, ()))
    compute = union(x for kind, part in by_kind.items() if kind != COMMUNICATION for x in part)
    busy = union([*communication, *compute])
    span = busy[-1][1] - busy[0][0]
    return Summary(
        span=span,
        busy={kind: length(union(by_kind[kind])) for kind in [*KINDS, REST] if kind in by_kind},
        communication=length(communication),
        exposed_communication=length(difference(communication, compute)),
        idle=span - length(busy),
        gaps=_gaps(slices, busy),
    )


def _gaps(slices: Sequence[Slice], busy: Sequence[Interval]) -> tuple[Gap, ...]:
    first = {piece.start: piece.name for piece in slices}
    last = {piece.end: piece.name for piece in slices}
    gaps = [Gap(a[1], b[0] - a[1], last[a[1]], first[b[0]]) for a, b in pairwise(busy)]
    return tuple(sorted(gaps, key=lambda gap: -gap.seconds)[:_NUM_GAPS])


def read_trace(path: Path) -> list[Slice]:
    """Return the work of a trace: that of the device or, without one, of the processor.

    Of the processor an operation counts for the time that it spends itself, not in those it calls.

    Raises:
        UserError: the file cannot be read as a trace.
    """
    try:
        raw = path.read_bytes()
        events = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a trace: {error}") from error
    complete = [event for event in events if event.get("ph") == "X"]
    device = [event for event in complete if event.get("cat") in _DEVICE]
    if device:
        return [_slice(event, event.get("args", {}).get("stream", 0)) for event in device]
    cpu = [event for event in complete if event.get("cat") in ("cpu_op", "user_annotation")]
    cpu = [event for event in cpu if not event["name"].startswith("ProfilerStep")]
    return _own_parts([_slice(event, event["tid"]) for event in cpu])


def _slice(event: dict[str, Any], stream: int | str) -> Slice:
    # Chrome's format counts in microseconds.
    start = event["ts"] / 1e6
    return Slice(event["name"], start, start + event["dur"] / 1e6, stream)


def _own_parts(slices: Iterable[Slice]) -> list[Slice]:
    """Return the parts of each piece of work in which none that it called was running."""
    ordered = sorted(slices, key=lambda piece: (str(piece.stream), piece.start, -piece.end))
    parts: list[Slice] = []
    callers: list[tuple[Slice, list[Interval]]] = []  # with what each has called so far

    def close(until: Slice | None) -> None:
        while callers and (
            until is None
            or until.stream != callers[-1][0].stream
            or until.start >= callers[-1][0].end
        ):
            piece, called = callers.pop()
            own = difference([(piece.start, piece.end)], called)
            parts.extend(Slice(piece.name, start, end, piece.stream) for start, end in own)

    for piece in ordered:
        close(piece)
        if callers:
            callers[-1][1].append((piece.start, piece.end))
        callers.append((piece, []))
    close(None)
    return parts


def summary_text(summary: Summary) -> str:
    """Return a summary as Markdown."""
    s = summary
    share = (lambda seconds: f"{100 * seconds / s.span:.1f}%") if s.span else (lambda _: "")
    rows = sorted(s.busy.items(), key=lambda item: -item[1])
    rows += [("communication that is exposed", s.exposed_communication), ("idle", s.idle)]
    lines = [f"{s.span * 1e3:.1f} ms", "", "| kind | ms | share |", "|---|---|---|"]
    lines += [f"| {kind} | {x * 1e3:.1f} | {share(x)} |" for kind, x in rows]
    lines += ["", "| longest gaps, ms | after | before |", "|---|---|---|"]
    lines += [f"| {g.seconds * 1e3:.3f} | {g.before[:60]} | {g.after[:60]} |" for g in s.gaps]
    return "\n".join(lines) + "\n"
