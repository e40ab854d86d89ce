"""What a running training shows: a live block on a terminal, plain lines elsewhere."""

import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kaiyuan.plan import PhasePlan
from kaiyuan.progress import human_count, human_seconds

# The time left goes by the median of so many steps, so that a save or a stall does not move it.
_PACE_STEPS = 50


class TrainingView:
    """The state of one phase, which each step renews.

    Args:
        phase: that is trained.
        steps: of all phases.
        console: where it is shown.
        signals: those that came to the launcher; from the first on, the training is ending.
        done: steps that earlier processes did.
        live: show the block, if the console is a terminal.
    """

    def __init__(
        self,
        phase: PhasePlan,
        steps: int,
        console: Console,
        signals: Sequence[int] = (),
        done: int = 0,
        live: bool = True,
    ) -> None:
        self.phase, self.steps, self.console, self.signals = phase, steps, console, signals
        self._step: dict[str, Any] | None = None
        self._done = max(done, phase.first_step)
        self._wanted = live and console.is_interactive
        self._seconds: deque[float] = deque(maxlen=_PACE_STEPS)
        self._began = time.monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(
            get_renderable=self.render, console=console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Self:
        if self._wanted:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()
        # The block is gone; what it said last stays.
        if self._step and self._wanted:
            self._say()

    @property
    def step(self) -> int:
        """Return the last step that was told of, 0 before the first."""
        return int(self._step["step"]) if self._step else 0

    def update(self, text: str) -> bool:
        """Take a step as a rank wrote it (see kaiyuan/megatron/records.py).

        Returns:
            Whether it was one; a line that was cut up by another is not.
        """
        try:
            step = json.loads(text)
            wanted = ("step", "loss", "learning_rate", "seconds", "tokens_per_second", "mfu", "due")
            self._step = {name: step[name] for name in wanted}
        except (ValueError, TypeError, KeyError):
            return False
        if self._step["seconds"]:
            self._seconds.append(self._step["seconds"])
        if self._step["due"] and not self._wanted:
            self._say()
        return True

    def _say(self) -> None:
        self.console.print(" ", self.line(), highlight=False)

    def line(self) -> str:
        """Return the last step in one line."""
        assert self._step
        return f"step {self._step['step']:,} of {self.steps:,}: {self._figures()}"

    def _figures(self) -> str:
        s = self._step
        assert s
        speed = s["tokens_per_second"]
        return (
            f"loss {s['loss']:.4f}, learning rate {s['learning_rate']:.2e}"
            + (f", {human_count(speed)} tokens/s" if speed else "")
            + (f", MFU {s['mfu']:.1%}" if s["mfu"] else "")
        )

    def render(self) -> RenderableType:
        """Return the block: what the last step was, and how far phase and run are."""
        done = self._step["step"] if self._step else self._done
        figures = f"  {self._figures()}" if self._step else ""
        head: RenderableType = Text(figures, no_wrap=True, overflow="ellipsis")
        if self.signals:
            note = " stopping: saving after this step (Ctrl-C again kills)"
            self._spinner.update(text=Text(note, style="yellow"))
        elif self._step is None:
            waited = human_seconds(time.monotonic() - self._began)
            self._spinner.update(text=f" starting the processes, {waited}")
        bars = Table.grid(padding=(0, 1))
        bars.add_column(no_wrap=True)
        bars.add_column(ratio=1)
        for _ in range(2):
            bars.add_column(justify="right", no_wrap=True)
        phase = self.phase
        bars.add_row(*self._bar(phase.name, done - phase.first_step, phase.steps))
        bars.add_row(*self._bar("run", done, self.steps))
        parts = [head, bars]
        if self.signals or self._step is None:
            parts[: 1 if self._step is None else 0] = [self._spinner]
        return Group(*parts)

    def _bar(self, name: str, done: int, steps: int) -> tuple[RenderableType, ...]:
        left = ""
        if self._seconds:
            left = human_seconds((steps - done) * statistics.median(self._seconds)) + " left"
        bar = ProgressBar(total=steps, completed=done)
        return f"  {name}", bar, f"{done:,} of {steps:,}, {done / steps:.0%}", left
