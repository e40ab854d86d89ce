"""Show a report of an inspection: tables on a terminal, or one self-contained HTML page."""

import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kaiyuan import __version__
from kaiyuan.data.inspect import Report
from kaiyuan.data.inspect_rank import RankReport
from kaiyuan.data.inspect_text import Distribution, TextReport
from kaiyuan.pages import write_html_file
from kaiyuan.progress import counted, human_bytes

Rows = list[tuple[str, str]]
_FILES_SHOWN = 20


def show(report: Report, console: Console) -> None:
    """Print a report as tables."""
    console.print(_files_table(report))
    for title, rows in sections(report):
        table = Table(title=title, title_justify="left", show_header=False)
        for name, value in rows:
            table.add_row(escape(name), escape(value))
        console.print(table)
    for sample in report.text.samples if report.text else []:
        console.print(f"[bold]{escape(_sample_title(sample))}[/bold]")
        console.print(escape(" ".join(sample["text"].split())))
    for title, lines in (("Notices", report.notices), ("What convert will do", report.verdict)):
        if lines:
            console.print(f"\n[bold]{title}[/bold]")
            for line in lines:
                console.print(f"- {escape(line)}")


def _files_table(report: Report) -> Table:
    table = Table(
        title=f"{counted(len(report.files), 'file')}, {human_bytes(report.size)}, "
        f"{counted(report.rows, 'row')}",
        title_justify="left",
    )
    table.add_column("file", overflow="fold")
    for name in ("size", "rows", "groups", "codec"):
        table.add_column(name, justify="right")
    for file in report.files[:_FILES_SHOWN]:
        table.add_row(
            escape(file.name),
            human_bytes(file.size),
            "[red]fault[/red]" if file.fault else f"{file.rows:,}",
            str(file.row_groups),
            ", ".join(file.codecs),
        )
    if len(report.files) > _FILES_SHOWN:
        table.add_row(f"... and {len(report.files) - _FILES_SHOWN} more", "", "", "", "")
    return table


def sections(report: Report) -> list[tuple[str, Rows]]:
    """Return the facts of a report as titled lists of name and value."""
    result: list[tuple[str, Rows]] = []
    for schema in report.schemas:
        columns = ", ".join(f"{name}: {kind}" for name, kind in schema["columns"].items())
        result.append(
            (f"Columns of {counted(len(schema['files']), 'file')}", [("columns", columns)])
        )
    if report.text is not None:
        result.append((_text_title(report, report.text), _text_rows(report, report.text)))
    if report.rank is not None:
        result.append(("Rank", _rank_rows(report.rank, report.text)))
    return result


def _text_title(report: Report, text: TextReport) -> str:
    if text.every_row:
        return f"Text, by all {text.rows:,} rows"
    return f"Text, by a sample of {text.rows:,} of {report.rows:,} rows"


def _text_rows(report: Report, text: TextReport) -> Rows:
    rows = max(text.rows, 1)
    known = [file.text_nulls for file in report.files if file.text_bytes is not None]
    nulls = f"{text.nulls / rows:.2%} of the sample"
    if all(count is not None for count in known):
        count = sum(count or 0 for count in known)
        nulls = f"{count:,} ({count / max(report.rows, 1):.2%}), by the footers"
    size = sum(file.text_bytes or 0 for file in report.files)
    result = [
        ("before compression", human_bytes(size)),
        ("null", nulls),
        ("empty", f"{text.empty / rows:.2%}"),
        ("broken UTF-8", f"{text.invalid / rows:.2%}"),
        ("characters", _described(text.characters)),
        ("bytes", _described(text.utf8_bytes)),
        ("kinds", _shares(text.kinds)),
        ("scripts", _shares(text.scripts)),
    ]
    if text.tokens is not None:
        per_token = f"{text.bytes_per_token:.2f}" if text.bytes_per_token else "?"
        result.append(("tokens", f"{_described(text.tokens)}; {per_token} bytes a token"))
    return result


def _described(sizes: Distribution) -> str:
    return (
        f"mean {sizes.mean:,.0f}, min {sizes.smallest:,}, median {sizes.median:,}, "
        f"p90 {sizes.p90:,}, p99 {sizes.p99:,}, max {sizes.largest:,}"
    )


def _shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in _notable(shares).items()) or "none"


def _notable(shares: dict[str, float]) -> dict[str, float]:
    return {name: share for name, share in shares.items() if share >= 0.0005}


def _rank_rows(rank: RankReport, text: TextReport | None) -> Rows:
    def count(value: int | None) -> str:
        return "not looked at" if value is None else f"{value:,}"

    whole = {True: "yes", False: "no", None: "not looked at"}[rank.contiguous]
    if rank.complete and rank.missing is None:
        whole = "no, it has fractions"
    files = ", ".join(f"{order} in {counted(n, 'file')}" for order, n in rank.in_files.items())
    return [
        ("type", ", ".join(f"{kind} in {counted(n, 'file')}" for kind, n in rank.types.items())),
        ("from, to", f"{rank.low}, {rank.high}" if rank.low is not None else "unknown"),
        ("rows without", count(rank.nulls)),
        ("duplicates", count(rank.duplicates)),
        ("each whole number once", whole),
        ("numbers left out", count(rank.missing) if rank.missing is not None else whole),
        ("order inside files", files or "not looked at"),
        ("order across files", rank.across_files),
        ("quality", quality_direction(text)),
    ]


def quality_direction(text: TextReport | None) -> str:
    """Say which way quality seems to run with the rank; a hint by crude signs, no proof."""
    if text is None or not text.quality:
        return "no sample to judge by"
    mean = sum(text.quality.values()) / len(text.quality)
    told = ", ".join(f"{name} {value:+.2f}" for name, value in text.quality.items())
    if abs(mean) < max(0.03, 3 / math.sqrt(text.rows)):
        return f"no direction to be seen ({told})"
    way = "higher" if mean > 0 else "lower"
    return f"seems better at {way} ranks, by crude signs ({told})"


def _sample_title(sample: dict[str, Any]) -> str:
    rank = "" if sample["rank"] is None else f", rank {sample['rank']}"
    name = Path(sample["file"]).name
    return f"{name}{rank}: {sample['kind']}, {sample['characters']:,} characters"


def write_html(report: Report, path: Path) -> None:
    """Write a report as one HTML file that loads nothing else."""
    environment = Environment(
        loader=PackageLoader("kaiyuan.data"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["bytes"] = human_bytes
    page = environment.get_template("inspect.html").render(
        report=report,
        sections=sections(report),
        histograms=_histograms(report.text),
        shares=_share_charts(report.text),
        curve=_curve(report.rank),
        sample_title=_sample_title,
        counted=counted,
        version=__version__,
        files_shown=200,
    )
    write_html_file(path, page)


def _histograms(text: TextReport | None) -> list[dict[str, Any]]:
    """Bars as parts of the highest one, with the lower edge of each as its label."""
    if text is None:
        return []
    charts = [("Characters a document", text.characters), ("Tokens a document", text.tokens)]
    result = []
    for title, sizes in charts:
        if sizes is None or not sizes.bars:
            continue
        highest = max(count for _, count in sizes.bars) or 1
        bars = [
            {"label": _short(edge), "part": count / highest, "count": count}
            for edge, count in sizes.bars
        ]
        result.append({"title": title, "bars": bars})
    return result


def _short(number: int) -> str:
    for unit in ("", "Ki", "Mi"):
        if number < 1024:
            return f"{number}{unit}"
        number //= 1024
    return f"{number}Gi"


def _share_charts(text: TextReport | None) -> list[dict[str, Any]]:
    if text is None:
        return []
    charts = [("Kinds of document", text.kinds), ("Characters by script", text.scripts)]
    return [{"title": title, "shares": _notable(shares)} for title, shares in charts if shares]


def _curve(rank: RankReport | None) -> list[tuple[float, float]]:
    """Position and rank of some rows, both from 0 to 1."""
    if rank is None or len(rank.curve) < 2:
        return []
    last = rank.curve[-1][0] or 1
    low = min(value for _, value in rank.curve)
    spread = (max(value for _, value in rank.curve) - low) or 1
    return [(place / last, (value - low) / spread) for place, value in rank.curve]
