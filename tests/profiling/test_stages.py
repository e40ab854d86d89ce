"""Layers of pipeline stages: as Megatron divides them."""

from types import SimpleNamespace

import pytest

from kaiyuan.config import load_params
from kaiyuan.errors import UserError
from kaiyuan.plan import make_plan
from kaiyuan.plan_summary import plan_summary
from kaiyuan.profiling.stages import layers_of_stages

LAYOUTS = [
    (28, 2, "Et*17|t*11L"),
    (28, 2, "Et*9|t*8|t*8|t*3L"),
    (30, 4, "Et,tt|(tt|)*6t,(tttt|)*3t|tL"),
    (6, 2, "E|(t*2|)*2t*2L"),
    (8, 4, "E|t*4|t*4|L"),
]
ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
# Layers, stages, chunks of a stage, other arguments.
EVEN = [
    (28, 1, None, {}),
    (28, 4, None, {}),
    (28, 2, 7, {"num_virtual_stages_per_pipeline_rank": 7}),
    (28, 2, 2, {"num_layers_per_virtual_pipeline_stage": 7}),
    (27, 2, None, {"account_for_loss_in_pipeline_split": True}),
    (26, 4, None, dict.fromkeys(ACCOUNTED, True)),
    (28, 4, None, {ENDS[0]: 10}),
    (28, 4, None, {"decoder_first_pipeline_num_layers": 7, "decoder_last_pipeline_num_layers": 5}),
    (
        28,
        2,
        None,
        {"decoder_first_pipeline_num_layers": 17, "decoder_last_pipeline_num_layers": 11},
    ),
]


@pytest.mark.parametrize(("layers", "stages", "layout"), LAYOUTS)
def test_layouts_are_read_as_megatron_reads_them(layers, stages, layout):
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    theirs = PipelineParallelLayerLayout(layout, stages)
    theirs.validate_layer_layout(layers, None)
    assert layers_of_stages(
        {
            "num_layers": layers,
            "pipeline_model_parallel_size": stages,
            "pipeline_model_parallel_layout": layout,
        }
    ) == [[chunk.count(LayerType.decoder) for chunk in stage] for stage in theirs.layout]


@pytest.mark.parametrize(("layers", "stages", "virtual", "more"), EVEN)
def test_without_a_layout_they_are_divided_as_megatron_divides_them(layers, stages, virtual, more):
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=more.get(ENDS[0]),
        num_layers_in_last_pipeline_stage=more.get(ENDS[1]),
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
    )
    vars(config).update({k: v for k, v in more.items() if k in vars(config)})
    arguments = {"num_layers": layers, "pipeline_model_parallel_size": stages, **more}
    assert layers_of_stages(arguments) == [
        [get_num_layers_to_build(config, chunk, stage) for chunk in range(virtual or 1)]
        for stage in range(stages)
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["pipeline_model_parallel_size=3"], "28 layers cannot be divided evenly among 3 stages"),
        (["decoder_last_pipeline_num_layers=40"], "28 layers cannot be divided evenly"),
        (["num_layers_per_virtual_pipeline_stage=4"], "the 14 layers of a stage cannot be divided"),
        (["pipeline_model_parallel_layout=Et*17|t*10L"], "has 27 layers in 2 parts"),
        (["pipeline_model_parallel_layout=Et*9|t*9|t*10L"], "has 28 layers in 3 parts"),
        (["pipeline_model_parallel_layout=t*17|t*11L"], "must begin with E"),
        (["pipeline_model_parallel_layout=Et*17|x*11L"], "must begin with E"),
    ],
)
def test_what_cannot_be_divided_is_said_by_the_plan(changes, said):
    changes = ["pipeline_model_parallel_size=2", *changes]
    with pytest.raises(UserError) as caught:
        plan_summary(make_plan(load_params("qwen3_1p7b", changes)), 6)
    assert said in str(caught.value)


# docs/multi_node.md: two H200, qwen3_1p7b, micro-batch 4, 64 samples a step. Peak GiB, tokens/s a
# GPU. What the last two have beyond the estimate was not looked for.
PIPELINE = "pipeline_model_parallel_size=2"
MEASURED = [
    ((PIPELINE, "pipeline_model_parallel_layout=Et*17|t*11L"), 57.3, 43_056, 0.005),
    ((PIPELINE, "pipeline_model_parallel_layout=Et*9|t*8|t*8|t*3L"), 68.4, 44_203, 0.03),
    (("context_parallel_size=2",), 43.3, None, 0.055),
]


@pytest.mark.parametrize(("changes", "gib", "speed", "tolerance"), MEASURED)
def test_measurements_on_two_gpus(changes, gib, speed, tolerance):
    batch = ("micro_batch_size=4", "global_batch_size=64")
    summary = plan_summary(make_plan(load_params("qwen3_1p7b", [*changes, *batch])), 2)
    assert sum(summary["memory_bytes_a_gpu"].values()) / 2**30 == pytest.approx(gib, rel=tolerance)
    if speed:
        estimate = summary["tokens"] / (summary["hours"] * 3600) / 2
        assert estimate == pytest.approx(speed, rel=0.025)
