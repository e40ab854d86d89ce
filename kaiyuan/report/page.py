"""Write the page: one HTML file that loads nothing else."""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from kaiyuan import __version__
from kaiyuan.pages import write_html_file
from kaiyuan.report import charts, compare, facts
from kaiyuan.report.data import phase_data
from kaiyuan.report.results import evaluations, validations
from kaiyuan.report.run import Run


def write_page(runs: Sequence[Run], path: Path) -> None:
    """Write the page of one run, or of several beside one another.

    Raises:
        UserError: the folder cannot be written to, another file is there, or a file of a run is
            damaged.
    """
    environment = Environment(
        loader=PackageLoader("kaiyuan.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = _template("charts.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = environment.get_template("report.html").render(
        **(_one(runs[0]) if len(runs) == 1 else _several(runs)),
        axes=charts.axes(runs),
        style=_template("report.css"),
        script=script,
        script_hash=digest,
        version=__version__,
    )
    write_html_file(path, page)


def _template(name: str) -> str:
    return resources.files("kaiyuan.report").joinpath("templates", name).read_text("utf-8")


def _one(run: Run) -> dict[str, Any]:
    data = phase_data(run)
    validated, evaluated = validations(run.folder), evaluations(run.folder)
    grids = [
        facts.phase_grid(run),
        facts.interruption_grid(run),
        facts.validation_grid(validated),
        facts.evaluation_grid(evaluated),
        facts.data_grid(run, data),
        facts.environment_grid(run),
        *facts.argument_grids(run),
        facts.hash_grid(run, data),
    ]
    return {
        "title": run.name,
        "kicker": f"Training of {run.manifest['name']}",
        "status": [facts.status(run), *run.manifest.get("changes", [])],
        "tiles": facts.tiles(run, validated),
        "charts": [
            *charts.training_charts([run]),
            *charts.validation_charts([run], [validated]),
            *charts.evaluation_chart(evaluated),
            *charts.data_charts(run, data),
            *charts.further_charts(run),
        ],
        "grids": [grid for grid in grids if grid],
    }


def _several(runs: Sequence[Run]) -> dict[str, Any]:
    validated = [validations(run.folder) for run in runs]
    evaluated = [evaluations(run.folder) for run in runs]
    grids = [
        compare.outcome_grid(runs, validated),
        compare.difference_grid(runs),
        compare.score_grid(runs, evaluated),
    ]
    return {
        "title": f"{len(runs)} runs",
        "kicker": "Comparison of trainings",
        "status": [f"{run.name}: {facts.status(run)}" for run in runs],
        "tiles": [],
        "charts": [
            *charts.training_charts(runs),
            *charts.validation_charts(runs, validated),
        ],
        "grids": [grid for grid in grids if grid],
    }
