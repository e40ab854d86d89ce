"""A real sweep of a toy on a CPU, with one that crashes, interrupted and gone on with."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kaiyuan.config import load_params
from kaiyuan.errors import UserError
from kaiyuan.profiling.estimate import Rates
from kaiyuan.profiling.grid import candidates, default_grid, read_grid
from kaiyuan.profiling.sweep import (
    Device,
    Job,
    Result,
    choose,
    estimated_peak,
    fewest_micro_batches,
    measuring_argv,
)
from kaiyuan.profiling.table import markdown, ranked, rows, write_all
from tests.conftest import ROOT, one_line_error, run_kaiyuan

# Small enough for a process to take a few seconds; 4 micro-batches of 2 at most.
SMALL = (
    *("num_layers=1", "seq_length=32", "max_position_embeddings=32"),
    *("vocab_size=512", "global_batch_size=8", "--seconds", "0.1"),
)
# A dropout of 2 is refused by torch, when the model is built.
GRID = ("--grid", "micro_batch_size=[8,2]", "--grid", "hidden_dropout=[0.0,2.0]", "--at-most", 3)


def profile(output, *more):
    return ("profile", "toy", *SMALL, *GRID, "--output", output, *more)


def results(folder):
    with (folder / "results.csv").open() as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep that was killed once its first result was there, and then went on."""
    folder = tmp_path_factory.mktemp("profile") / "sweep"
    command = [sys.executable, "-m", "kaiyuan", *map(str, profile(folder))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(folder.glob("runs/*/result.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait()
    [first] = folder.glob("runs/*/result.json")
    before = first.stat().st_mtime_ns
    said = run_kaiyuan(*profile(folder, "--trace")).stdout
    assert first.stat().st_mtime_ns == before
    return folder, said


def test_a_crash_is_a_result_and_the_rest_is_ranked(swept):
    folder, said = swept
    assert "1 of 3: " in said and "3 of 3: " in said
    rows = results(folder)
    statuses = [row["status"] for row in rows]
    assert statuses == ["measured", "measured", "failed", "left out"]
    assert [row["rank"] for row in rows] == ["1", "2", "", ""]
    assert "dropout probability" in rows[2]["error"]
    for row in rows[:2]:
        # 8 samples of 32 tokens a step; on a CPU there is no peak to compare with.
        seconds = float(row["step_seconds"])
        assert float(row["tokens_per_second"]) == pytest.approx(256 / seconds, rel=1e-2)
        assert row["peak_gib"] == ""
    assert float(rows[0]["tokens_per_second"]) >= float(rows[1]["tokens_per_second"])
    # What was calibrated has no error: the params' own settings.
    calibration = json.loads((folder / "calibration.json").read_text())
    [own] = [row for row in rows if row["configuration"] == calibration["configuration"]]
    assert own["configuration"].startswith("mb=8-hidden_dropout=0.0")
    assert float(own["time_error"]) == 0
    assert (folder / "results.png").read_bytes().startswith(b"\x89PNG")


def test_the_overlay_is_what_was_fastest_and_planning_takes_it(swept):
    folder, said = swept
    path = folder / "overlay.yaml"
    size = int(results(folder)[0]["configuration"].split("-")[0].removeprefix("mb="))
    changed = load_params("toy", overlay=path)
    assert changed.hparams["micro_batch_size"] == size
    # The line to go on with has all that the overlay lacks.
    changes = " ".join(word for word in SMALL if "=" in word)
    assert f"\nkaiyuan train toy {changes} --overlay {path} --data DATA --output RUN\n" in said
    said = run_kaiyuan("plan", "toy", "--overlay", path, "global_batch_size=24", "--json").stdout
    assert json.loads(said)["batch"]["micro-batches a step"] == 24 // size
    # An override comes after it.
    assert load_params("toy", ["micro_batch_size=4"], path).hparams["micro_batch_size"] == 4


def test_training_takes_the_overlay(swept, demo, tmp_path):
    folder, _ = swept
    path = folder / "overlay.yaml"
    argv = ("train", "toy", "--data", demo.folder / "data", "--output", tmp_path / "run")
    assert "ready to train" in run_kaiyuan(*argv, "--overlay", path, "--check").stdout
    path = tmp_path / "overlay.yaml"
    path.write_text("micro_batchsize: 4\n")
    assert "did you mean 'micro_batch_size'" in one_line_error(*argv, "--overlay", path)


def test_the_trace_is_summarised(swept):
    folder, said = swept
    summary = json.loads((folder / "trace" / "rank-0.json").read_text())
    assert summary["busy"]["matrix products"] > 0
    assert 0 <= summary["idle"] < summary["span"]
    assert "| matrix products |" in said


def test_a_step_of_few_micro_batches_tells_one_of_many():
    params = load_params("qwen3_1p7b")
    [candidate] = candidates(params, {"micro_batch_size": [4]}, 1)
    assert (candidate.micro_batches, fewest_micro_batches(candidate)) == (512, 4)
    # 4 micro-batches of 0.3 s and 0.1 s for the rest: 512 take 153.7 s.
    measured = {"steps": [1.3, 1.29, 1.32], "micro_batches": 4, "micro_batch": 0.3}
    result = Result(candidate, "measured", {**measured, "memory": [{"allocated": 0}]})
    assert result.step_seconds == pytest.approx(512 * 0.3 + 0.1)
    assert result.tokens_per_second == pytest.approx(2048 * 4096 / 153.7)
    assert result.spread == pytest.approx(0.03 / 1.3)


def test_stages_get_a_whole_number_of_micro_batches():
    params = load_params("qwen3_1p7b", ["global_batch_size=240"])
    grid = {"micro_batch_size": [1, 5], "pipeline_model_parallel_size": [4]}
    one, five = candidates(params, grid, 4)
    assert (fewest_micro_batches(one), fewest_micro_batches(five)) == (16, 16)
    job = Job(ROOT, Device("cpu", None), 4)
    argv = measuring_argv(five, job)
    assert argv[argv.index("--global-batch-size") + 1] == "80"
    # A check has 32 micro-batches at most.
    for candidate, samples in ((one, "32"), (five, "160")):
        argv = measuring_argv(candidate, job, check=True)
        assert argv[argv.index("--global-batch-size") + 1] == samples
    assert "--save-interval" not in argv


def test_a_measurement_does_not_end_where_the_training_would():
    params = load_params("toy", ["exit_interval=2", "exit_duration_in_mins=1"])
    [candidate] = candidates(params, {"micro_batch_size": [8]}, 1)
    argv = measuring_argv(candidate, Job(ROOT, Device("cpu", None)))
    assert not {"--exit-interval", "--exit-duration-in-mins"} & set(argv)


def test_what_cannot_fit_is_not_run():
    params = load_params("qwen3_1p7b")
    found = candidates(params, default_grid(params.arguments(params.phases[0]), 1), 1)
    assert len(found) == 12
    # On a card of 80 GB (79.6 GiB), micro-batches of 8 fit with recomputation alone.
    run, dropped = choose(found, int(79.6 * 2**30), 100)
    assert [r.candidate.name for r in dropped] == ["mb=8-recompute=none"]
    assert all(estimated_peak(each) < 79 * 2**30 for each in run)
    assert run[0].name == "mb=4-recompute=none"  # the fastest by estimate
    run, dropped = choose(found, None, 3)
    assert len(run) == 3 and {r.status for r in dropped} == {"left out"}


def test_what_would_be_run_is_a_table_without_empty_columns():
    found = candidates(load_params("toy"), {"micro_batch_size": [8, 4]}, 1)
    listed = [Result(found[0], "to be run"), Result(found[1], "left out", error="too many")]
    head, rule, *lines = markdown(rows(listed, Rates(), Device("cpu", None))).splitlines()
    names = [name.strip() for name in head.strip("|").split("|")]
    assert names == ["configuration", "tokens/s", "estimated GiB", "estimated tokens/s"]
    assert rule == "".join("|" if char == "|" else "-" for char in head)
    assert [line.split("|")[2].strip() for line in lines] == ["to be run", "left out: too many"]
    assert {len(line) for line in lines} == {len(head)}


def test_the_grid_of_several_gpus():
    params = load_params("qwen3_1p7b")
    arguments = params.arguments(params.phases[0])
    found = candidates(params, default_grid(arguments, 8), 8)
    layouts = {
        (
            c.arguments.get("tensor_model_parallel_size", 1),
            c.arguments.get("pipeline_model_parallel_size", 1),
            c.data_parallel,
        )
        for c in found
    }
    assert (1, 1, 8) in layouts and (2, 1, 4) in layouts and (2, 4, 1) in layouts
    assert all(tp * pp * dp == 8 and 28 % pp == 0 for tp, pp, dp in layouts)
    assert all(
        c.arguments.get("sequence_parallel")
        for c in found
        if c.arguments.get("tensor_model_parallel_size", 1) > 1
    )
    # What is the params' own is no change; so the first of all is none.
    plain = [c for c in found if not c.changes]
    assert [c.settings["micro_batch_size"] for c in plain] == [4]


def test_an_out_of_memory_ranks_last(tmp_path):
    params = load_params("gpt_smoke")
    one, two = candidates(params, {"micro_batch_size": [4, 8]}, 1)
    measured = {"steps": [0.5] * 3, "micro_batches": 4, "micro_batch": 0.1, "loss": 12.0}
    measured["memory"] = [{"allocated": 17 * 2**30, "reserved": 18 * 2**30}]
    got = [
        Result(two, "out of memory", error="CUDA out of memory"),
        Result(one, "measured", measured),
    ]
    assert [r.status for r in ranked(got)] == ["measured", "out of memory"]
    write_all(got, None, Device("NVIDIA H200", 0), tmp_path)
    first, second = results(tmp_path)
    # 0.5 s are 4 x 0.1 and 0.1; the real step has 8.
    assert float(first["step_seconds"]) == 0.9
    assert float(first["memory_error"]) == pytest.approx(16.45 / 17 - 1, abs=1e-3)
    assert second["rank"] == "" and second["error"] == "CUDA out of memory"
    assert (tmp_path / "overlay.yaml").read_text().endswith("global batch of 32.\n{}\n")
    assert load_params("gpt_smoke", overlay=tmp_path / "overlay.yaml") == params


@pytest.mark.parametrize("model", ["gpt_smoke", "qwen3_1p7b", "kaiyuan_2b_fp16"])
def test_the_shipped_grids_have_eight_configurations_that_fit_an_h200(model):
    grid = read_grid([str(ROOT / "scripts/kaiyuan2b-profiling/params" / model / "grid.yaml")])
    run, _ = choose(candidates(load_params(model), grid, 1), 140 * 2**30, 100)
    assert len(run) >= 8


def test_mistakes_on_the_command_line(tmp_path):
    for words, message in (
        (["--trace-ranks", "0,2"], "ranks below 2"),
        (["--data", tmp_path], "has no manifest.json"),
        (["--calibration", tmp_path / "none.json"], "cannot be read as a calibration"),
        (["--overlay", tmp_path / "none.yaml"], "is missing"),
    ):
        argv = ("profile", "toy", "--nproc", 2, "--output", tmp_path / "sweep", *words)
        assert message in one_line_error(*argv)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("recompute=[most]", "recompute takes none, mlp, full in a grid"),
        ("micro_batchsize=[4]", "did you mean 'micro_batch_size'"),
        ("nowhere.yaml", "cannot be read as a grid"),
        ("micro_batch_size=[4", "not valid YAML"),
        (
            "micro_batch_size=[5]",
            "of the grid can be run: the global batch of 8 is no multiple of 5",
        ),
        ("seq_length=[512]", r"run: .*max_position_embeddings \(256\) must be at least seq_length"),
        ("context_parallel_size=[0]", "run: .*context_parallel_size must be a whole number from 1"),
        ("tensor_model_parallel_size=[x]", "tensor_model_parallel_size must be a whole number"),
        ("micro_batch_size=[]", "micro_batch_size has no values in the grid"),
        ("recompute=[[none]]", r"recompute takes none, mlp, full in a grid, not \['none'\]"),
        ("overlap=[yes, {a: 1}]", "overlap takes True, False in a grid"),
    ],
)
def test_mistakes_in_a_grid(grid, message):
    with pytest.raises(UserError, match=message):
        candidates(load_params("toy"), read_grid([grid]), 1)


@pytest.mark.parametrize("text", ["5: [1]\n", "null: [1]\n", "[4]\n", "4\n", ""])
def test_a_file_that_is_no_grid(tmp_path, text):
    (tmp_path / "grid.yaml").write_text(text)
    with pytest.raises(UserError, match="must be a mapping of names to lists of values"):
        read_grid([str(tmp_path / "grid.yaml")])


@pytest.mark.slow
def test_two_processes_and_a_check(tmp_path):
    argv = profile(tmp_path, "--nproc", 2, "--grid", "hidden_dropout=0.0", "--check")
    said = run_kaiyuan(*argv, "--grid", "tensor_model_parallel_size=[1,2]").stdout
    rows = results(tmp_path)
    assert {row["status"] for row in rows} == {"measured"}
    assert {row["configuration"].split("tensor")[0][:4] for row in rows} == {"mb=2", "mb=8"}
    check = json.loads((tmp_path / "check.json").read_text())
    assert check["samples_a_step"] == 8  # the real global batch
    assert check["promised_tokens_per_second"] == pytest.approx(
        float(rows[0]["tokens_per_second"]), rel=1e-3
    )
    assert "promised" in said
