"""Checks of the argument values that plan, estimate and records compute with.

Megatron's own parser and validation have the last word, in training; these find the same mistakes
at once, without loading it.
"""

import math
from collections.abc import Mapping
from typing import Any

from kaiyuan.errors import UserError

# Whole numbers from 1 on.
_COUNTS = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "seq_length", "max_position_embeddings"),
    *("vocab_size", "make_vocab_size_divisible_by", "micro_batch_size", "global_batch_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "save_interval"),
    *("eval_interval", "log_interval", "lr_decay_samples", "lr_wsd_decay_samples"),
)
# Finite numbers from 0 on.
_AMOUNTS = (
    *("lr", "min_lr", "lr_warmup_samples", "weight_decay", "clip_grad", "adam_beta1"),
    *("adam_beta2", "adam_eps", "norm_epsilon", "init_method_std", "attention_dropout"),
    "hidden_dropout",
)
# Finite numbers above 0.
_POSITIVE = ("output_logit_cap", "initial_loss_scale", "min_loss_scale", "loss_scale")
# Megatron's OptimizerParamScheduler has these.
_CHOICES = {
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "lr_wsd_decay_style": ("linear", "cosine", "exponential", "minus_sqrt"),
}
# The launcher sets these itself.
_DERIVED = (
    *("train_samples", "train_iters", "phase_transition_iterations", "phase_name", "data_path"),
    *("save", "load", "record_to", "override_opt_param_scheduler", "measure_to"),
    "measure_seconds",
)


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer, which True and False are not meant to be."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_values(arguments: Mapping[str, Any], where: str) -> None:
    """Check the arguments of a phase.

    Raises:
        UserError: a value has the wrong type or range, or two of them do not fit together.
    """
    for key, value in arguments.items():
        if key in _DERIVED:
            raise UserError(f"{where}: {key} is set by kaiyuan itself and cannot be given")
        if key in _COUNTS and not (is_whole(value) and value >= 1):
            raise UserError(f"{where}: {key} must be a whole number from 1 on, not {value!r}")
        if key in _AMOUNTS and value is not None and not _is_amount(value):
            raise UserError(f"{where}: {key} must be a number from 0 on, not {value!r}")
        if key in _POSITIVE and value is not None and not (_is_amount(value) and value > 0):
            raise UserError(f"{where}: {key} must be a number above 0, not {value!r}")
        if key in _CHOICES and value not in _CHOICES[key]:
            raise UserError(f"{where}: {key} must be one of {', '.join(_CHOICES[key])}")
    if arguments.get("lr") is None:
        raise UserError(f"{where}: lr must be given")
    _check_fit(arguments, where)


def _is_amount(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def _check_fit(a: Mapping[str, Any], where: str) -> None:
    heads, groups = a.get("num_attention_heads"), a.get("num_query_groups")
    if heads and groups and heads % groups:
        raise UserError(
            f"{where}: num_attention_heads ({heads}) must be a multiple of num_query_groups "
            f"({groups})"
        )
    length, positions = a.get("seq_length"), a.get("max_position_embeddings")
    if length and positions and positions < length:
        raise UserError(
            f"{where}: max_position_embeddings ({positions}) must be at least seq_length ({length})"
        )
    if a.get("eod_mask_loss"):
        raise UserError(f"{where}: eod_mask_loss is not supported: the end of a document is learnt")
    if a.get("sandwich_norm") and (
        a.get("transformer_impl") != "local" or not a.get("disable_bias_linear")
    ):
        raise UserError(
            f"{where}: sandwich_norm needs transformer_impl: local and disable_bias_linear: true, "
            "the layers that have it"
        )
