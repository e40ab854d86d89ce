"""Checks of the argument values that plan, estimate and records compute with.

Megatron's own parser and validation have the last word, in training; these find the same mistakes
at once, without loading it.
"""

import math
from collections.abc import Mapping
from typing import Any

from kaiyuan.accepted import FIXED, FIXED_BY_DEFAULT
from kaiyuan.errors import UserError

# Whole numbers from 1 on.
_COUNTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "seq_length", "max_position_embeddings"),
    *("vocab_size", "make_vocab_size_divisible_by", "micro_batch_size", "global_batch_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("save_interval", "eval_interval", "log_interval", "lr_decay_samples"),
    *("lr_wsd_decay_samples", "seed"),
)
# The same, or none.
_OPTIONAL_COUNTS = (
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("recompute_num_layers", "save_retain_interval", "exit_interval"),
)
# Finite numbers from 0 on.
_AMOUNTS = (
    *("lr", "min_lr", "lr_warmup_samples", "weight_decay", "clip_grad", "adam_beta1"),
    *("adam_beta2", "adam_eps", "norm_epsilon", "init_method_std", "attention_dropout"),
    "hidden_dropout",
)
# Finite numbers above 0.
_POSITIVE = (
    "max_loss_jump",
    "output_logit_cap",
    "initial_loss_scale",
    "min_loss_scale",
    "loss_scale",
)
# Megatron's OptimizerParamScheduler has these.
_CHOICES = {
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "lr_wsd_decay_style": ("linear", "cosine", "exponential", "minus_sqrt"),
    "transformer_impl": ("local", "transformer_engine"),
}


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer, which True and False are not meant to be."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_values(arguments: Mapping[str, Any], where: str) -> None:
    """Check the arguments of a phase.

    Raises:
        UserError: a value has the wrong type or range, or two of them do not fit together.
    """
    for key, value in arguments.items():
        counts = key in _COUNTS or (key in _OPTIONAL_COUNTS and value is not None)
        if counts and not (is_whole(value) and value >= 1):
            raise UserError(f"{where}: {key} must be a whole number from 1 on, not {value!r}")
        if key in _AMOUNTS and value is not None and not _is_amount(value):
            raise UserError(f"{where}: {key} must be a number from 0 on, not {value!r}")
        if key in _POSITIVE and value is not None and not (_is_amount(value) and value > 0):
            raise UserError(f"{where}: {key} must be a number above 0, not {value!r}")
        if key in _CHOICES and value not in _CHOICES[key]:
            raise UserError(f"{where}: {key} must be one of {', '.join(_CHOICES[key])}")
    for key, wanted in FIXED.items():
        given = arguments.get(key)
        if given is None and key in FIXED_BY_DEFAULT:
            continue
        if given != wanted or isinstance(given, bool) != isinstance(wanted, bool):
            raise UserError(f"{where}: {key} must be {_yaml(wanted)}, not {_yaml(given)}")
    workers = arguments.get("num_workers")
    if workers is not None and not (is_whole(workers) and workers >= 0):
        raise UserError(f"{where}: num_workers must be a whole number from 0 on, not {workers!r}")
    _check_kinds(arguments, where)
    if arguments.get("lr") is None:
        raise UserError(f"{where}: lr must be given")
    _check_fit(arguments, where)


def _check_kinds(a: Mapping[str, Any], where: str) -> None:
    given = a.get("recompute_modules") or []
    modules = [given] if isinstance(given, str) else given
    if not (isinstance(modules, list) and all(isinstance(name, str) for name in modules)):
        raise UserError(f"{where}: recompute_modules must be a list of names, not {_yaml(given)}")
    layout = a.get("pipeline_model_parallel_layout")
    if layout is not None and not isinstance(layout, str):
        raise UserError(
            f"{where}: pipeline_model_parallel_layout must be text, as Et|tL, not {_yaml(layout)}"
        )


def _yaml(value: Any) -> str:
    words = {"True": "true", "False": "false", "None": "null"}
    return words.get(repr(value), repr(value))


def _is_amount(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def _check_fit(a: Mapping[str, Any], where: str) -> None:
    _check_heads(a, where)
    lowest = a.get("min_lr") or 0
    if lowest > a["lr"]:
        raise UserError(f"{where}: min_lr ({lowest}) is above lr ({a['lr']}): give min_lr, too")
    if a.get("fp16") and a.get("bf16"):
        raise UserError(f"{where}: fp16 and bf16 exclude each other: give one of them")
    length, positions = a.get("seq_length"), a.get("max_position_embeddings")
    if length and positions and positions < length:
        raise UserError(
            f"{where}: max_position_embeddings ({positions}) must be at least seq_length ({length})"
        )
    interval, retain = a.get("save_interval"), a.get("save_retain_interval")
    if interval and retain and retain % interval:
        raise UserError(
            f"{where}: save_retain_interval ({retain}) must be a multiple of save_interval "
            f"({interval})"
        )
    if a.get("eod_mask_loss"):
        raise UserError(f"{where}: eod_mask_loss is not supported: the end of a document is learnt")
    if a.get("sandwich_norm") and a.get("transformer_impl") != "local":
        raise UserError(
            f"{where}: sandwich_norm needs transformer_impl: local, the layers that have it"
        )


def _check_heads(a: Mapping[str, Any], where: str) -> None:
    heads, groups = a.get("num_attention_heads"), a.get("num_query_groups")
    if heads and groups and heads % groups:
        raise UserError(
            f"{where}: num_attention_heads ({heads}) must be a multiple of num_query_groups "
            f"({groups})"
        )
    size, hidden = a.get("kv_channels"), a.get("hidden_size")
    if heads and hidden and not size:
        if hidden % heads:
            raise UserError(
                f"{where}: hidden_size ({hidden}) must be a multiple of num_attention_heads "
                f"({heads}) where kv_channels is not given"
            )
        size = hidden // heads
    if size and size % 2:
        raise UserError(
            f"{where}: the size of a head (kv_channels, {size}) must be even: rotary positions "
            "turn pairs"
        )
