"""All kinds of parallelism give the curve of one process, from a common start."""

import shutil

import numpy as np
import pytest

from .engine import losses, samples, train

SHORT = [f"phase{i}.max_samples=16" for i in range(2, 6)]
SHORT += ["phase1.max_samples=32", "lr_warmup_samples=40", "micro_batch_size=2"]

TENSOR = ["tensor_model_parallel_size=2", "sequence_parallel=true"]
PIPELINE = ["pipeline_model_parallel_size=2"]
CONTEXT = ["context_parallel_size=2"]
LAYOUTS = {
    "data parallel 2": (2, []),
    "data parallel 4": (4, []),
    "tensor parallel 2, sequence parallel": (2, TENSOR),
    "pipeline 2": (2, PIPELINE),
    "data 2 x tensor 2": (4, TENSOR),
    "data 2 x pipeline 2": (4, PIPELINE),
    "tensor 2 x pipeline 2": (4, TENSOR + PIPELINE),
    "context parallel 2": (2, CONTEXT),
    "context 2 x tensor 2": (4, CONTEXT + TENSOR),
}


@pytest.fixture(scope="module")
def start(demo, make_params, tmp_path_factory):
    """Return a function that gives a run at step 2 of phase 1, and that run at its end."""
    made = {}

    def get(phases, options=()):
        if (phases, options) not in made:
            params = make_params([f"phase{i}" for i in phases])
            mine = [
                text for text in SHORT if not text.startswith("phase") or int(text[5]) in phases
            ]
            mine += options
            run = tmp_path_factory.mktemp("start") / "run"
            said = train(run, demo.folder / "data", params, *mine, "exit_interval=2")
            assert "stopped and saved at step 2" in said
            finished = run.with_name("finished")
            copy(run, finished)
            train(finished, demo.folder / "data", params, *mine)
            made[phases, options] = run, finished, params, mine
        return made[phases, options]

    return get


def copy(run, to):
    shutil.copytree(run, to)
    shutil.copytree(run.with_name(f"{run.name}-samples"), to.with_name(f"{to.name}-samples"))


def curve(demo, start, layout, tmp_path, phases, *more, options=()):
    """Return a run with a layout and one in a single process, from a common start."""
    begun, finished, params, short = start(phases, options)
    processes, changes = LAYOUTS[layout]
    run = tmp_path / "run"
    copy(begun, run)
    train(run, demo.folder / "data", params, *short, *changes, *more, "--nproc", processes)
    return run, finished


def compare(demo, start, layout, tmp_path, phases, *more):
    run, finished = curve(demo, start, layout, tmp_path, phases, *more)
    mine = np.array(losses(run), dtype=float)
    reference = np.array(losses(finished), dtype=float)
    assert len(mine) == 4 + 2 * (len(phases) - 1)
    assert np.abs(mine - reference).max() <= 1e-4
    assert mine.tolist() != reference.tolist(), "other layouts add in another order"
    return run, finished


@pytest.mark.slow
def test_a_mixture_of_layouts_with_loader_workers(demo, start, tmp_path):
    more = "num_workers=2"
    run, finished = compare(demo, start, "data 2 x tensor 2", tmp_path, (1, 5), more)
    assert len(samples(run)) == 6 * 8
    assert samples(run) == samples(finished)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_layouts_over_all_phases(demo, start, tmp_path, layout):
    run, finished = compare(demo, start, layout, tmp_path, (1, 2, 3, 4, 5))
    if layout.startswith("data parallel"):
        assert samples(run) == samples(finished)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS][2:4])  # tensor parallel, pipeline
def test_layouts_of_the_variant(demo, start, tmp_path, layout):
    # So low a cap that it changes every logit.
    variant = ("sandwich_norm=true", "output_logit_cap=2")
    run, finished = curve(demo, start, layout, tmp_path, (1, 5), options=variant)
    mine, reference = (np.array(losses(r), dtype=float) for r in (run, finished))
    assert np.abs(mine - reference).max() <= 2e-6
    log = (run / "logs" / "phase1-node0.log").read_text()
    assert "-model-parallel size: 2" in log


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_order_for_any_number_of_ranks_and_loader_workers(
    demo, start, tmp_path, processes, workers
):
    begun, finished, params, short = start((1, 5))
    run = tmp_path / "run"
    copy(begun, run)
    more = [*short, f"num_workers={workers}", "--nproc", processes]
    train(run, demo.folder / "data", params, *more)
    assert len(samples(run)) == 6 * 8
    assert samples(run) == samples(finished)
