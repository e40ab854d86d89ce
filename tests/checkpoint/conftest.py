"""A small model with sizes that are not square, trained with the real engine at every layout."""

import dataclasses
import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console
from tokenizers import Tokenizer

from kaiyuan.checkpoint.describe import CheckpointInfo, describe_checkpoint
from kaiyuan.checkpoint.export import export
from kaiyuan.checkpoint.parity import megatron_logits
from kaiyuan.config import load_params
from kaiyuan.data.convert import convert
from kaiyuan.data.tokenizer import train_tokenizer
from kaiyuan.plan import Plan, make_plan
from kaiyuan.train import Nodes, train

VOCAB = 1003
SEQUENCE = 64
MODEL = {
    "num_layers": 2,
    "hidden_size": 96,
    "ffn_hidden_size": 200,
    "num_attention_heads": 6,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 20,
    "seq_length": SEQUENCE,
    "max_position_embeddings": 128,
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "qk_layernorm": True,
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.05,
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "no_rope_fusion": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": VOCAB,
    "make_vocab_size_divisible_by": 128,
}
# A rate that moves every norm away from 1 within a few steps.
HPARAMS = {
    "seed": 7,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "lr_decay_style": "constant",
    "lr": 1e-2,
    "min_lr": 1e-2,
    "weight_decay": 0.1,
    "eval_iters": 0,
    "eval_interval": 1000,
    "log_interval": 10,
    "ckpt_format": "torch_dist",
}
STEPS = 8


def texts() -> list[str]:
    return [inspect.getsource(module) for module in (inspect, json, subprocess)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(texts(), folder, VOCAB)
    return folder


@pytest.fixture(scope="session")
def tokens(tokenizer) -> list[list[int]]:
    """64 tokens of real text."""
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return [encoder.encode(inspect.getsource(os)).ids[:SEQUENCE]]


@pytest.fixture(scope="session")
def plan(tmp_path_factory, tokenizer) -> tuple[Plan, Path]:
    """The plan of a training, and the folder of its converted data."""
    folder = tmp_path_factory.mktemp("plan")
    source = folder / "parquet"
    source.mkdir()
    pq.write_table(pa.table({"text": texts()}), source / "part.parquet", compression="zstd")
    convert([source], folder / "data" / "phase1", tokenizer, order="file", workers=1)
    params = folder / "params"
    params.mkdir()
    (params / "model.yaml").write_text(yaml.safe_dump(MODEL))
    (params / "hparams.yaml").write_text(yaml.safe_dump(HPARAMS))
    samples = STEPS * HPARAMS["global_batch_size"]
    phases = {"phase1": {"order": "file", "max_samples": samples}}
    (params / "data.yaml").write_text(yaml.safe_dump({"phases": phases}))
    data = folder / "data"
    return make_plan(load_params(str(params)), data), data


# Tensor and pipeline parallel size.
LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2), "tp2pp2": (2, 2)}


def layout_arguments(layout: str) -> dict[str, object]:
    tp, pp = LAYOUTS[layout]
    return {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "sequence_parallel": tp > 1,
        # The average needs several checkpoints; each takes seconds.
        "save_interval": 2 if layout == "tp1" else 1000,
    }


def with_arguments(plan: Plan, arguments: dict[str, object]) -> Plan:
    phases = [
        dataclasses.replace(phase, arguments=phase.arguments | arguments) for phase in plan.phases
    ]
    return dataclasses.replace(plan, phases=tuple(phases))


@pytest.fixture(scope="session")
def trained(tmp_path_factory, plan, tokenizer) -> Callable[[str], Path]:
    """Return the run of a layout; each is trained once."""

    @functools.cache
    def run_of(layout: str) -> Path:
        the_plan, data = plan
        tp, pp = LAYOUTS[layout]
        run = tmp_path_factory.mktemp(layout) / "run"
        console = Console(file=sys.stderr)
        changed = with_arguments(the_plan, layout_arguments(layout))
        train(changed, data, run, Nodes(tp * pp), tokenizer, console=console)
        return run

    return run_of


@pytest.fixture(scope="session")
def run(trained) -> Path:
    return trained("tp1")


@pytest.fixture(scope="session")
def info(run) -> CheckpointInfo:
    return describe_checkpoint(run)


@pytest.fixture(scope="session")
def expected(info, tokens):
    """What Megatron computes with the checkpoint of ``info`` for ``tokens``."""
    return megatron_logits(info, tokens)


@pytest.fixture(scope="session")
def hf(info, tmp_path_factory) -> Path:
    """The checkpoint of ``info``, exported in fp32; not to be changed."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    export(info, folder, "float32")
    return folder
