"""What `kaiyuan report` does."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from kaiyuan.pages import check_page
from kaiyuan.report.page import write_page
from kaiyuan.report.run import Run
from kaiyuan.report.table import draw_losses, phase_table


def report(folders: Sequence[Path], output: Path | None) -> Iterator[str]:
    """Print a table of each run, and write the page and of a single run its loss.png.

    Yields:
        Where they are.

    Raises:
        UserError: a run cannot be read, or the page not be written.
    """
    page = output or (folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html"))
    check_page(page)
    runs = [Run(folder, str(folder) if len(folders) > 1 else None) for folder in folders]
    console = Console()
    for run in runs:
        if len(runs) > 1:
            console.print(run.name, highlight=False, markup=False)
        console.print(phase_table(run))
    write_page(runs, page)
    yield f"report: {page}"
    if len(runs) == 1:
        picture = folders[0] / "loss.png"
        try:
            draw_losses(runs[0], picture)
        except ImportError:
            yield "no loss.png: it needs matplotlib (pip install 'kaiyuan[train]')"
        else:
            yield f"loss curve: {picture}"
