"""The page of a run in a real browser, and what it says, against what the run wrote."""

import csv
import datetime
import html
import importlib.metadata
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys

import numpy as np
import pytest

from kaiyuan.config import load_params
from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.errors import UserError
from kaiyuan.files import write_json, write_manifest
from kaiyuan.plan import make_plan
from kaiyuan.report import Run, write_page
from kaiyuan.report.events import further_series
from kaiyuan.report.reduce import BUCKETS, smooth, thin
from kaiyuan.report.table import phase_reports
from kaiyuan.runfolder import latest_step, record
from kaiyuan.starts import Start, add_start, read_starts

from .browser import browse, needs_browser, open_page
from .conftest import one_line_error, run_kaiyuan
from .engine import children, records, start, steps_done, train, wait_for

BATCH, SEQUENCE = 8, 256  # of the toy
TOKENS = BATCH * SEQUENCE


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    return tmp_path_factory.mktemp("profile")


def make_run(folder, phases, rows, changes=()):
    """Write a run of phases of so many steps; `rows` are what differs from the usual row."""
    wanted = [f"phase{i}.max_samples={steps * BATCH}" for i, steps in enumerate(phases, start=1)]
    wanted += [f"phase{i}.tokens={(steps + 1) * TOKENS}" for i, steps in enumerate(phases, start=1)]
    plan = make_plan(load_params("toy", [*wanted, "lr_warmup_samples=8", *changes]))
    folder.mkdir(parents=True)
    record(plan, folder)
    write_rows(folder, plan, rows)
    return plan


def write_rows(folder, plan, rows):
    with (folder / "loss.csv").open("w", newline="") as stream:
        out = csv.writer(stream)
        for number, row in enumerate(rows, start=1):
            phase = next(p for p in plan.phases if number <= p.last_step)
            usual = {
                "iteration": number,
                "phase": phase.name,
                "samples": number * BATCH,
                "tokens": number * TOKENS,
                "loss": 3.0,
                "learning_rate": f"{phase.learning_rate(number):.9g}",
                "grad_norm": 0.5,
                "seconds": 2.0,
                "phase_samples": (number - phase.first_step) * BATCH,
                "tokens_per_second": TOKENS / 2,
                "tflops": 400,
                "mfu": 0.4,
            }
            if number == 1:
                out.writerow(usual)
            out.writerow((usual | row).values())


FIRST = {"seconds": "", "tokens_per_second": "", "tflops": "", "mfu": ""}


# ---- a real run ---------------------------------------------------------------------------------


def test_a_run_records_when_and_on_what_its_processes_began(demo):
    rows = records(demo.folder / "run")
    starts = read_starts(demo.folder / "run")
    first = [(int(row["iteration"]), row["phase"]) for row in rows if row["seconds"] == ""]
    assert [(begun.step, begun.phase) for begun in starts] == first
    assert [phase for _, phase in first] == list(dict.fromkeys(row["phase"] for row in rows))
    for begun, after in itertools.zip_longest(starts, starts[1:]):
        assert (begun.again, begun.device) == (0, "cpu")
        for name in ("torch", "megatron-core"):
            assert begun.versions[name] == importlib.metadata.version(name)
        assert begun.layout["world_size"] == 1 and begun.layout["micro_batch_size"] == 8
        assert begun.data == str(demo.folder / "data" / begun.phase)
        assert after is None or after.time > begun.time


@needs_browser
def test_the_page_of_the_demo(demo, profile):
    run = demo.folder / "run"
    rows = records(run)
    page = open_page(run / "report.html", profile)
    assert page.console == []
    for chart in ("loss", "grad_norm", "speed", "tflops"):
        raw, mean = page.series(chart).items()
        assert (raw[0], mean[0]) == ("each step", "mean of 5 steps")
        # The first step of the processes of a phase has no time of its own.
        untimed = 5 if chart in ("speed", "tflops") else 0
        assert raw[1] == len(rows) - untimed
        assert mean[1] >= raw[1]
    assert page.series("learning_rate") == {"planned": len(rows), "recorded": len(rows)}
    # Only the last three phases have ranks.
    assert (
        page.series("rank")["trained on"]
        == sum(1 for row in rows if row["phase"] in ("phase3", "phase4", "phase5")) + 3
    )
    assert set(page.series("lengths")) == {"trained on"}
    labels = re.findall(r'class="phase">([^<]+)</text>', page.dom)
    assert labels == ["phase1", "phase2", "phase3", "phase4", "phase5"] * len(page.charts)
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    steps = [sum(row["phase"] == phase for row in rows) for phase in phases]
    assert page.row("steps planned") == page.row("steps done") == [f"{n:,}" for n in steps]
    assert page.row("tokens trained on") == [f"{n * TOKENS:,}" for n in steps]
    assert "Every recorded learning rate is the planned one." in page.dom
    assert "None: each phase was trained in one go." in page.dom
    manifest = json.loads((demo.folder / "data" / "phase4" / "manifest.json").read_text())
    assert manifest["seal"] in page.dom and manifest["order"]["hash"] in page.dom
    assert page.row("documents")[3] == f"{manifest['counts']['documents']:,}"
    assert re.search(r"<dt>device</dt><dd>cpu</dd>.*<dt>torch</dt><dd>\d", page.dom, re.S)
    # Nothing to load: no address but the name of SVG in the script.
    assert set(re.findall(r"https?://[^\s\"]*", page.dom)) == {"http://www.w3.org/2000/svg"}


def test_ranks_are_those_of_the_parquet(demo):
    """The rank at a step is that of the document which the next sample begins in."""
    import pyarrow.parquet as pq

    run = demo.folder / "run"
    page = (run / "report.html").read_text()
    drawn = json.loads(re.search(r'id="page-data">(.*?)</script>', page, re.S)[1])
    chart = next(chart for chart in drawn["charts"] if chart["id"] == "rank")
    found = dict(zip(chart["series"][0]["x"], chart["series"][0]["y"], strict=True))
    phase = ConvertedPhase.open(demo.folder / "data" / "phase5")
    table = pq.read_table(demo.folder / "corpus" / "phase5").to_pylist()
    ranked = sorted((row for row in table if row["text"]), key=lambda row: row["rank"])
    lengths = [len(phase.tokens(int(document))) for document in phase.order()]
    first = next(p["steps"] for p in drawn_phases(run) if p["name"] == "phase5")
    last = int(records(run)[-1]["iteration"])
    position, ends = 5 * TOKENS, np.cumsum(lengths)
    document = next(i for i, end in enumerate(ends) if end > position)
    assert found[last - first + 5] == ranked[document]["rank"]


def drawn_phases(run):
    return json.loads((run / "run.json").read_text())["phases"]


def probed(page, folder, script):
    """Return a copy of a page that also runs a script, which the page itself would not allow."""
    text = re.sub(r"<meta http-equiv[^>]*>", "", page.read_text())
    (folder / "probed.html").write_text(
        text.replace("</body>", f"<script>{script}</script></body>")
    )
    return folder / "probed.html"


@needs_browser
def test_a_phone_and_paper(demo, profile, tmp_path):
    """Nothing is cut off; looks are judged by eye."""
    page = demo.folder / "run" / "report.html"
    # The page measures itself: what is wider than the window, other than in a box that scrolls.
    measure = """parent.postMessage("wide:" + [...document.querySelectorAll("*")]
      .filter((e) => !e.closest(".scroll") && e.getBoundingClientRect().right > innerWidth + 1)
      .map((e) => e.tagName).join() + " of " + innerWidth, "*")"""
    probed(page, tmp_path, measure)
    # A window cannot be as narrow as a phone, a frame can.
    (tmp_path / "phone.html").write_text(
        """<!doctype html><script>addEventListener("message", (m) => document.body.append(m.data))
        </script><body><iframe src="probed.html" style="width: 390px; border: 0"></iframe></body>"""
    )
    said = browse(tmp_path / "phone.html", profile, "--dump-dom").stdout
    assert "wide: of 390" in said, said
    browse(page, profile, f"--print-to-pdf={tmp_path / 'page.pdf'}", "--no-pdf-header-footer")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


@needs_browser
def test_cursor_zoom_and_tokens(demo, profile, tmp_path):
    """A hand on the page: point at the last step, choose tokens, drag over the middle third."""
    hand = """
      const out = {};
      const svg = () => document.querySelector("#chart-loss svg");
      const touch = (kind, share) => {
        const box = svg().querySelector("clipPath rect").getBBox();
        const all = svg().getBoundingClientRect();
        svg().setPointerCapture = () => {};
        const inside = (box.x + share * box.width) / svg().viewBox.baseVal.width;
        const at = { clientX: all.left + inside * all.width, clientY: all.top + 50, button: 0 };
        svg().dispatchEvent(new PointerEvent(kind, at));
      };
      const labels = () => [...svg().querySelectorAll("text")].map((t) => t.textContent);
      touch("pointermove", 1);
      out.at = document.querySelector("#chart-loss .at").textContent;
      out.loss = document.querySelector("#chart-loss .key b").textContent;
      out.other = document.querySelector("#chart-grad_norm .key b").textContent;
      document.querySelector("[data-axis=tokens]").click();
      out.tokens = labels();
      document.querySelector("[data-axis=steps]").click();
      touch("pointerdown", 1 / 3); touch("pointermove", 2 / 3); touch("pointerup", 2 / 3);
      out.points = Number(svg().querySelector("[data-series]").dataset.points);
      out.zoomed = !document.querySelector("[data-reset]").hidden;
      document.querySelector("[data-reset]").click();
      out.all = Number(svg().querySelector("[data-series]").dataset.points);
      document.body.dataset.hand = JSON.stringify(out);"""
    page = open_page(probed(demo.folder / "run" / "report.html", tmp_path, hand), profile)
    assert page.console == []
    found = json.loads(html.unescape(re.search(r'data-hand="([^"]*)"', page.dom)[1]))
    rows = records(demo.folder / "run")
    steps, last = len(rows), rows[-1]
    total = f"{float(f'{int(last["tokens"]):.3g}') / 1000:g}k tokens"
    assert found["at"] == f"step {steps} · phase5 · {total}"
    assert found["loss"] == f"{float(f'{float(last["loss"]):.4g}'):g}"
    assert found["other"] == f"{float(f'{float(last["grad_norm"]):.4g}'):g}"
    assert "tokens trained on" in found["tokens"] and "100k" in found["tokens"]
    assert found["zoomed"]
    assert found["points"] == pytest.approx(steps / 3 + 2, abs=2)
    assert found["all"] == steps


def test_it_needs_no_torch(demo, tmp_path):
    script = "import sys; from kaiyuan.cli import app; app(sys.argv[1:], standalone_mode=False); "
    script += "assert not {'torch', 'megatron'} & set(sys.modules)"
    run, page = demo.folder / "run", tmp_path / "page.html"
    command = [sys.executable, "-c", script, "report", str(run), "--output", str(page)]
    assert subprocess.run(command).returncode == 0
    assert page.exists()


# ---- a long run ---------------------------------------------------------------------------------


@needs_browser
def test_two_hundred_thousand_steps_open_at_once(profile, tmp_path):
    run = tmp_path / "run"
    steps, spike = 200_000, 123_457
    noise = np.random.default_rng(1).normal(0, 0.1, steps)
    losses = 2 + 9 * np.exp(-np.arange(steps) / 20_000) + noise
    losses[spike - 1] = 17.25
    phases = [steps // 5] * 5
    rows = ({"loss": f"{loss:.9g}", "grad_norm": f"{abs(loss) / 4:.9g}"} for loss in losses)
    plan = make_run(run, phases, rows)
    assert plan.steps == steps
    path = tmp_path / "page.html"
    write_page([Run(run)], path)
    assert path.stat().st_size < 1_000_000
    pages = []
    while len(pages) < 3 and not (pages and pages[-1].milliseconds < 2000):
        pages.append(open_page(path, profile))  # again only where other work held the machine
    page = pages[-1]
    assert page.console == []
    assert page.milliseconds < 2000
    raw = page.data["charts"][0]["series"][0]
    assert raw["y"][raw["x"].index(spike)] == 17.25
    assert max(page.series("loss").values()) > 2500
    assert page.series("mfu")
    assert "0.4%" not in page.dom and "40.0%" in page.dom


# ---- interruptions ------------------------------------------------------------------------------


def at(seconds):
    begin = datetime.datetime(2026, 11, 30, 12, 0, 0, tzinfo=datetime.UTC)
    return begin + datetime.timedelta(seconds=seconds)


@pytest.fixture
def interrupted(tmp_path):
    """Phases of 10 steps of 2 s; killed after step 16 with step 13 saved, 1000 s of nothing."""
    run = tmp_path / "killed"
    rows = [{} for _ in range(20)]
    for step in (1, 11, 14):
        rows[step - 1] = FIRST
    phases = [10, 10, 10, 10, 10]
    make_run(run, phases, rows)
    layout = {"world_size": 2, "micro_batch_size": 8}
    add_start(run, Start(1, "phase1", at(0), layout=layout, device="H200"))
    # 18 s of steps, 30 s of starting.
    add_start(run, Start(11, "phase2", at(48), layout=layout, device="H200"))
    # Steps 12 to 16 ended at 58; 14 to 16, of 6 s, are done again.
    more = {"world_size": 4, "micro_batch_size": 4}
    again = Start(14, "phase2", at(1058), 3, 6.0, layout=more, device="H200")
    add_start(run, again)
    return run


def test_the_gap_is_not_taken_for_slowness(interrupted):
    run = Run(interrupted)
    assert [int(step) for step in run.steps] == list(range(1, 21))
    assert [(part.start.step, part.last_step, part.resumed) for part in run.parts] == [
        (1, 10, False),
        (11, 13, False),
        (14, 20, True),
    ]
    assert [part.seconds for part in run.parts] == [18, 4, 12]
    assert [part.away for part in run.parts] == [None, 30, 1000]
    assert np.nanmin(run.columns["tokens_per_second"]) == TOKENS / 2
    assert not run.finished
    assert run.recorded == at(1058 + 12)


@needs_browser
def test_the_page_of_an_interrupted_run(interrupted, profile, tmp_path):
    said = run_kaiyuan("report", interrupted).stdout
    assert "phase2" in said and "3.000 -> 3.000" in said
    page = open_page(interrupted / "report.html", profile)
    assert page.console == []
    assert page.series("loss")["each step"] == 20
    assert page.series("speed")["each step"] == 17
    assert page.series("learning_rate") == {"planned": 50, "recorded": 20}
    assert page.dom.count("went on with step 14</title>") == len(page.charts)
    cells = page.row("2026-11-30 12:17 UTC")
    change = "world size: 2 → 4, micro batch size: 8 → 4"
    assert cells == ["phase2", "14", "3 steps, 6 s", "16 min 40 s", change]
    assert page.row("world size") == ["2", "4"]
    assert "steps 1 to 13" in page.dom and "steps 14 to 20" in page.dom
    assert "Step 20 of 50, in phase2" in page.dom and "1 min left at its pace" in page.dom


def test_a_phase_that_was_begun_twice(interrupted):
    """Killed before its first checkpoint, a phase begins again with the step it began with."""
    add_start(interrupted, Start(11, "phase2", at(2000), 10, 20.0))
    parts = Run(interrupted).parts
    assert [(part.start.step, part.last_step) for part in parts] == [
        (1, 10),
        (11, 10),
        (14, 10),
        (11, 20),
    ]
    assert [part.resumed for part in parts] == [False, False, True, True]
    assert parts[-1].seconds == 16


def test_a_run_that_recorded_no_starts(interrupted):
    (interrupted / "starts.jsonl").unlink()
    parts = Run(interrupted).parts
    assert [(part.start.step, part.resumed) for part in parts] == [
        (1, False),
        (11, False),
        (14, True),
    ]
    assert {part.away for part in parts} == {None}


def test_a_line_that_is_being_written(interrupted):
    for name in ("loss.csv", "starts.jsonl"):
        with (interrupted / name).open("a") as stream:
            stream.write("21,phase3,168" if name == "loss.csv" else '{"step": 21, "ph')
    run = Run(interrupted)
    assert int(run.steps[-1]) == 20
    assert len(read_starts(interrupted)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_real_run_that_was_killed(demo, make_params, tmp_path, processes):
    run, params = tmp_path / "run", make_params(["phase1", "phase3"])
    short = ["phase1.max_samples=64", "phase3.max_samples=24", "save_interval=4"]
    short += ["lr_warmup_samples=40", "micro_batch_size=4", "--nproc", processes]
    process = start(run, demo.folder / "data", params, *short)
    wait_for(lambda: steps_done(run) >= 6, process)
    (child,) = children(process.pid)
    # Torchrun stands between launcher and ranks.
    os.kill(child if processes == 1 else children(child)[0], signal.SIGKILL)
    _, error = process.communicate()
    assert process.returncode == 2
    assert "phase1 was killed by SIGKILL" in error
    assert f"the same command goes on from step {latest_step(run)}" in error
    killed, saved = len(records(run)), latest_step(run)
    train(run, demo.folder / "data", params, *short)
    read = Run(run)
    assert [int(step) for step in read.steps] == list(range(1, 12))
    resumed = [part.start for part in read.parts if part.resumed]
    assert [(s.step, s.again) for s in resumed] == [(saved + 1, killed - saved)]
    # The clock of the run: its parts, and what lies between, fill the time from first to last.
    first, last = read.parts[0].start.time, read.parts[-1].start.time
    lost = sum(part.start.again_seconds for part in read.parts)
    between = sum(part.away for part in read.parts[1:])
    between += sum(part.seconds for part in read.parts[:-1])
    assert (last - first).total_seconds() == pytest.approx(between + lost, abs=0.1)
    assert all(part.away > 0 for part in read.parts[1:])


# ---- strangers' texts ---------------------------------------------------------------------------


@needs_browser
def test_nothing_of_a_run_becomes_markup(profile, tmp_path):
    bad = (
        "</script><script>document.title='taken'</script><img src=x onerror=document.title='taken'>"
    )
    run = tmp_path / "run"
    make_run(run, [5, 5, 5, 5, 5], [{}] * 25)
    manifest = json.loads((run / "run.json").read_text())
    for phase in manifest["phases"]:
        phase["arguments"]["wandb_exp_name"] = bad
    manifest["name"] = bad
    manifest["changes"] = [bad]
    body = {key: value for key, value in manifest.items() if key not in ("kind", "seal")}
    write_manifest(run, "run", body, "run.json")
    add_start(run, Start(1, "phase1", at(0), device=bad, versions={bad: bad}, data=bad))
    (run / f"validation-{bad.replace('/', '')}.csv").write_text(
        "iteration,loss,bits_per_byte\n5,3.1,1.2\n"
    )
    path = tmp_path / "page.html"
    write_page([Run(run, bad)], path)
    page = open_page(path, profile)
    assert page.console == []
    assert "<img" not in page.dom
    assert re.search(r"<title>(.*?)</title>", page.dom)[1].endswith("· kaiyuan")
    assert f"<dt>device</dt><dd>{html.escape(bad, quote=False)}</dd>" in page.dom
    assert page.dom.count("<script") == 2


# ---- results and comparison ---------------------------------------------------------------------


def results(run, step, value):
    folder = run / "checkpoints" / f"iter_{step:07d}-eval"
    part = {"alias": " - part", "acc,none": 0.9, "acc_stderr,none": 0.1}
    whole = {"alias": "sums", "acc,none": value, "acc_stderr,none": 0.0125}
    content = {"iteration": step, "results": {"sums": whole, "sums_part": part}}
    write_json(folder / "results.json", content)


@needs_browser
def test_validation_and_evaluation_by_checkpoint(profile, interrupted):
    (interrupted / "validation-held.csv").write_text(
        "iteration,loss,bits_per_byte\n10,3.25,1.5\n20,2.75,1.25\n"
    )
    results(interrupted, 20, 0.75)
    results(interrupted, 10, 0.5)
    run_kaiyuan("report", interrupted)
    page = open_page(interrupted / "report.html", profile)
    assert page.console == []
    assert page.series("validation-held") == {"held": 2}
    assert page.series("evaluation") == {"sums: acc": 2}
    assert page.row("10") == ["3.2500", "1.5000"]
    assert page.row("sums: acc") == ["0.5000 ± 0.0125", "0.7500 ± 0.0125"]


@needs_browser
def test_what_is_no_finite_number(profile, tmp_path):
    """Steps of fp16 that were left out, and a checkpoint that says nothing any more."""
    rows = [{} for _ in range(50)]
    rows[25] = {"loss": "nan", "grad_norm": "inf"}
    make_run(tmp_path / "run", [10] * 5, rows)
    (tmp_path / "run" / "validation-held.csv").write_text(
        "iteration,loss,bits_per_byte\n10,3.25,1.5\n20,nan,nan\n"
    )
    write_page([Run(tmp_path / "run")], tmp_path / "page.html")
    page = open_page(tmp_path / "page.html", profile)
    assert page.console == []
    assert page.series("loss") == {"each step": 49, "mean of 5 steps": 50}
    assert page.series("grad_norm")["each step"] == 49
    assert page.series("validation-held") == {"held": 1}
    assert page.row("20") == ["nan", "nan"]


@needs_browser
def test_two_runs_on_one_page(profile, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    make_run(a, [10] * 5, [{"loss": 3.0}] * 50)
    make_run(b, [10] * 5, [{"loss": 2.5}] * 30, ["lr=0.006"])
    out = tmp_path / "both.html"
    said = run_kaiyuan("report", a, b, "--output", out).stdout
    assert f"report: {out}" in said
    page = open_page(out, profile)
    assert page.console == []
    assert page.series("loss") == {str(a): 50, str(b): 30}
    assert page.row("Steps") == ["50 of 50, 100%", "30 of 50, 60%"]
    assert page.row("Loss") == [f"{n} nats a token, last 5 steps" for n in ("3.000", "2.500")]
    before = ", ".join(f"phase{i}: {0.005 if i == 1 else 0.003}" for i in range(1, 6))
    assert page.row("lr") == [before, "0.006"]
    assert "micro_batch_size" not in page.dom.split("Settings that differ")[1]
    assert not (a / "report.html").exists()


def test_mistakes(interrupted, tmp_path):
    assert "has no run.json" in one_line_error("report", tmp_path)
    (interrupted / "validation-x.csv").write_text("iteration,loss,bits_per_byte\n10,a,b\n")
    assert "is not what kaiyuan validate writes" in one_line_error("report", interrupted)
    assert not (interrupted / "report.html").exists()
    (interrupted / "loss.csv").unlink()
    assert "has no record of a training" in one_line_error("report", interrupted)


def test_only_a_page_of_ours_gives_way(interrupted, tmp_path):
    record_of_run = (interrupted / "run.json").read_bytes()
    said = one_line_error("report", interrupted, "--output", interrupted / "run.json")
    assert "run.json is there already and no page of kaiyuan's" in said
    assert (interrupted / "run.json").read_bytes() == record_of_run
    for _ in range(2):
        write_page([Run(interrupted)], tmp_path / "page.html")
    (tmp_path / "page.html").write_text("<!doctype html>\nmine")
    with pytest.raises(UserError, match="no page of kaiyuan's"):
        write_page([Run(interrupted)], tmp_path / "page.html")


@pytest.mark.parametrize(("steps", "first", "last"), [(1, 0, 0), (3, 0, 2), (4, 0.5, 2.5)])
def test_the_losses_at_both_ends_of_a_short_phase(tmp_path, steps, first, last):
    make_run(tmp_path / "run", [steps] * 5, [{"loss": float(i)} for i in range(steps)])
    report = phase_reports(Run(tmp_path / "run"))[0]
    assert (report.first_loss, report.last_loss) == (first, last)


# ---- arithmetic ---------------------------------------------------------------------------------


def test_thinning_keeps_every_extreme():
    generator = random.Random(3)
    y = [generator.gauss(0, 1) for _ in range(400 * BUCKETS)]
    y[31_415] = -50.0
    y[27_182] = 60.0
    y[100] = float("nan")
    xs, ys = thin(np.arange(1, len(y) + 1), np.array(y))
    assert len(xs) <= 2 * BUCKETS + 2
    assert xs == sorted(set(xs)) and xs[0] == 1 and xs[-1] == len(y)
    assert all(value == float(f"{y[x - 1]:.6g}") for x, value in zip(xs, ys, strict=True))
    kept = dict(zip(xs, ys, strict=True))
    for begin in range(0, len(y), 400):
        part = [value for value in y[begin : begin + 400] if value == value]
        shown = [kept[x] for x in range(begin + 1, begin + 401) if x in kept]
        assert min(shown) == float(f"{min(part):.6g}") and max(shown) == float(f"{max(part):.6g}")


def test_the_mean_begins_anew_with_a_phase():
    y = [1.0, 2.0, float("nan"), 4.0, 10.0, 20.0, 30.0, 40.0]
    got = smooth(np.array(y), [slice(0, 4), slice(4, 8)], 3)
    expected = [[1.0], [1.0, 2.0], [1.0, 2.0], [2.0, 4.0]]
    expected += [[10.0], [10.0, 20.0], [10.0, 20.0, 30.0], [20.0, 30.0, 40.0]]
    assert got.tolist() == [statistics.fmean(values) for values in expected]


def test_events_of_a_killed_process_give_way(tmp_path):
    """Written by torch's own writer, of two processes: steps 1 to 6, then 4 to 5 again."""
    from torch.utils.tensorboard import SummaryWriter

    for number, (first, last) in enumerate([(1, 6), (4, 5)]):
        with SummaryWriter(str(tmp_path), filename_suffix=f".{number}") as writer:
            for step in range(first, last + 1):
                writer.add_scalar("loss-scale", 2.0**number * step, step)
                writer.add_scalar("lm loss", 1.0, step)
                writer.add_scalar("constant", 1.0, step)
                writer.add_scalar("loss-scale vs samples", 1.0 * step, step * 8)
    found = further_series(tmp_path, last_step=5)
    assert list(found) == ["loss-scale"]
    steps, values = found["loss-scale"]
    assert steps.tolist() == [1, 2, 3, 4, 5]
    assert values.tolist() == [1, 2, 3, 8, 10]
