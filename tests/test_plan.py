"""The plan: steps and rates against Megatron's scheduler, arguments against golden files."""

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kaiyuan.config import load_params
from kaiyuan.errors import UserError
from kaiyuan.plan import make_plan
from kaiyuan.plan_summary import kept_checkpoints, learning_rate_knots, plan_summary
from tests.test_params import MODELS, ask_megatron

GOLDEN = Path(__file__).parent / "golden"


def kaiyuan(*argv):
    return subprocess.run(
        [sys.executable, "-m", "kaiyuan", *argv], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("model", MODELS)
def test_arguments_are_the_golden_ones(model):
    """Written anew by: KAIYUAN_WRITE_GOLDEN=1 pytest tests/test_plan.py; read the difference."""
    lines = [
        shlex.join([phase.name, *phase.argv]) for phase in make_plan(load_params(model)).phases
    ]
    text = "".join(line.replace(" --", "\n  --") + "\n" for line in lines)
    golden = GOLDEN / f"{model}.txt"
    if os.environ.get("KAIYUAN_WRITE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_rates_are_those_of_megatrons_scheduler():
    asked = [_schedules(model) for model in MODELS]
    answers = iter(ask_megatron("rates", [one for _, all_of in asked for one in all_of]))
    for model, (rates, schedules) in zip(MODELS, asked, strict=True):
        of_megatron = [next(answers) for _ in schedules]
        assert rates == pytest.approx(of_megatron, rel=1e-12), model


def _schedules(model):
    """Return our rates at some steps, and what Megatron's scheduler is asked there."""
    plan = make_plan(load_params(model))
    # Evenly over the training, and at the seams of the phases.
    even = range(0, plan.steps, plan.steps // 20)
    seams = [p.first_step for p in plan.phases] + [p.last_step - 1 for p in plan.phases]
    steps = sorted({*even, *seams})
    schedules = []
    for step in steps:
        a = next(p for p in plan.phases if step < p.last_step).arguments
        schedules.append(
            {
                "done": step * a["global_batch_size"],
                "max_lr": a["lr"],
                "min_lr": a["min_lr"],
                "lr_warmup_steps": a["lr_warmup_samples"],
                "lr_decay_steps": a["lr_decay_samples"],
                "lr_decay_style": a["lr_decay_style"],
                "wsd_decay_steps": a.get("lr_wsd_decay_samples"),
                "lr_wsd_decay_style": a.get("lr_wsd_decay_style"),
            }
        )
    return [plan.learning_rate(step) for step in steps], schedules


def test_schedule_of_the_main_model():
    plan = make_plan(load_params("qwen3_1p7b"))
    ends = [phase.last_step for phase in plan.phases]
    # By hand: 1000e9 - 1 tokens // 4096 // 2048 = 119,209 steps, and so on.
    assert ends == [119_209, 190_734, 224_112, 247_953, 262_258]
    assert plan.learning_rate(0) == 0
    assert plan.learning_rate(500) == 2.5e-3
    assert plan.learning_rate(1000) == plan.learning_rate(119_208) == 5e-3
    assert plan.learning_rate(119_209) == plan.learning_rate(247_953) == 3e-3
    # A quarter into the decay, half of the way from 3e-3 to 6e-4 is done.
    quarter = 247_953 + 14_305 / 4
    assert plan.phases[4].learning_rate(quarter) == pytest.approx(1.8e-3)
    assert [step for step, _ in learning_rate_knots(plan)] == [
        *(1, 1_001, 119_209, 119_210, 247_954, 262_258)
    ]


def test_checkpoints_that_are_kept():
    plan = make_plan(load_params("toy", ["save_interval=10", "save_retain_interval=20"]))
    last = [phase.last_step for phase in plan.phases]
    kept = kept_checkpoints(plan)
    # Every 20th, and the last; the ends of phases go like all others.
    assert kept == [*range(20, last[-1], 20), last[-1]]
    # In the decay of the main model all are kept: the last 8 are averaged.
    main = make_plan(load_params("qwen3_1p7b"))
    assert kept_checkpoints(main)[-8:] == [*range(259_600, 262_001, 400), 262_258]


def test_the_command_line_answers_at_once_without_torch():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = json.loads(kaiyuan("plan", "qwen3_1p7b", "--gpus", "64", "--tflops", "500", "--json"))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Of the processor, so that a busy machine does not matter.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 1
    assert said["parameters"]["total"] == 2_031_739_904
    assert said["batch"]["data parallel"] == 64
    assert said["batch"]["micro-batches a step"] == 8
    # 6 x (28 x (2048 x 4096 + 2048 x 2048 + 3 x 2048 x 6144 + 2048 x 4096) + 2048 x 151,936)
    a_token = 6 * (28 * (2048 * 4096 * 2 + 2048 * 2048 + 3 * 2048 * 6144) + 2048 * 151_936)
    assert said["flops_a_token"] == a_token
    assert said["hours"] == pytest.approx(262_258 * 8_388_608 * a_token / 64 / 500e12 / 3600)
    # Weights in bf16, master copy and two moments in fp32.
    assert said["checkpoints"]["bytes_each"] == 2_031_739_904 * 14
    assert {phase["source"] for phase in said["phases"]} == {"assumed"}
    code = "import sys, kaiyuan.plan_summary; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_text_has_the_figures():
    text = kaiyuan("plan", "gpt_smoke")
    for figure in ("339,563,520", "* assumed", "241 to 300", "--num-layers 12", "phase5: "):
        assert figure in text


def test_a_folder_of_data_that_is_not_there(tmp_path):
    params = load_params("toy")
    with pytest.raises(UserError, match="nothere is not a folder"):
        make_plan(params, tmp_path / "nothere")
    # One without any phase, one too deep, one of parquet.
    for name in ("phase1/manifest.json", "phase2/a.parquet"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / "corpus").mkdir()
    for folder in ("corpus", "phase1", "phase2"):
        with pytest.raises(UserError, match=f"{folder} has none of the converted phases phase1, p"):
            make_plan(params, tmp_path / folder)


def test_an_uneven_batch_is_refused():
    plan = make_plan(load_params("qwen3_1p7b"))
    with pytest.raises(UserError, match="2048 is no multiple of 384"):
        plan_summary(plan, gpus=96)
    with pytest.raises(UserError, match="fewer than one global batch"):
        make_plan(load_params("toy", ["phase3.tokens=2000"]))
