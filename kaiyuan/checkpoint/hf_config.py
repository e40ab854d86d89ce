"""Megatron's arguments and the config.json of Qwen3ForCausalLM, in both directions.

A model with sandwich norm or a cap on its logits is a KaiyuanForCausalLM, which
modeling_kaiyuan.py makes of Qwen3ForCausalLM.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kaiyuan.checkpoint.describe import CheckpointInfo
from kaiyuan.checkpoint.names import Sizes
from kaiyuan.errors import UserError

# Megatron's argument, the key in config.json, the type, and Megatron's default where it has one
# (megatron/training/arguments.py). YAML takes 1e-6, without a point, for a text; Megatron does not
# mind, and so the types are needed here.
_KEYS: tuple[tuple[str, str, type[int] | type[float], float | None], ...] = (
    ("num_layers", "num_hidden_layers", int, None),
    ("hidden_size", "hidden_size", int, None),
    ("ffn_hidden_size", "intermediate_size", int, None),
    ("num_attention_heads", "num_attention_heads", int, None),
    ("num_query_groups", "num_key_value_heads", int, None),
    ("kv_channels", "head_dim", int, None),
    ("max_position_embeddings", "max_position_embeddings", int, None),
    ("norm_epsilon", "rms_norm_eps", float, 1e-5),
    ("init_method_std", "initializer_range", float, 0.02),
)
_ROPE_BASE_DEFAULT = 10_000

# What makes a Qwen3 of a GPTModel. An import writes them; an export refuses any other value.
_QWEN3: dict[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "qk_layernorm": True,
    "group_query_attention": True,
    "position_embedding_type": "rope",
}
# What Qwen3ForCausalLM cannot express; Megatron's default where it can.
_ABSENT: dict[str, Any] = {
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None,
    "apply_layernorm_1p": False,
    "add_qkv_bias": False,
    "num_experts": None,
    "multi_latent_attention": False,
    "window_size": None,
}

# What makes a KaiyuanForCausalLM of it: our argument, the key in config.json, the type.
_VARIANT: tuple[tuple[str, str, type[bool] | type[float]], ...] = (
    ("sandwich_norm", "sandwich_norm", bool),
    ("output_logit_cap", "final_logit_softcapping", float),
)

ARCHITECTURE = "Qwen3ForCausalLM"
VARIANT = "KaiyuanForCausalLM"
# Its code, which an export carries along.
VARIANT_CODE = Path(__file__).with_name("modeling_kaiyuan.py")


def to_config(info: CheckpointInfo, dtype: str, end_of_document: int | None) -> dict[str, Any]:
    """Return config.json.

    The base of the rotary embedding stands in it twice: ``rope_theta`` is what transformers reads
    up to version 4 (and vLLM and llama.cpp), ``rope_parameters`` what it reads from version 5. A
    reader that finds neither takes Qwen3's 1,000,000, and the model then talks nonsense.

    Raises:
        UserError: the model is not one that Qwen3ForCausalLM can be.
    """
    model = canonical_model(info.model)
    base = float(model["rotary_base"])
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "vocab_size": info.vocab_size,
        **{hf: model[name] for name, hf, _, _ in _KEYS},
        "hidden_act": "silu",
        "rope_theta": base,
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": not model["untie_embeddings_and_output_weights"],
        "use_cache": True,
        "eos_token_id": end_of_document,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if is_variant(info):
        module = VARIANT_CODE.stem
        classes = {"AutoConfig": "KaiyuanConfig", "AutoModelForCausalLM": VARIANT}
        config |= {
            "architectures": [VARIANT],
            "model_type": "kaiyuan",
            "auto_map": {auto: f"{module}.{name}" for auto, name in classes.items()},
            **{hf: model[name] for name, hf, _ in _VARIANT if name in model},
        }
    return dict(sorted(config.items()))


def is_variant(info: CheckpointInfo) -> bool:
    """Tell whether a model has parts that make it a KaiyuanForCausalLM."""
    return any(info.model.get(name) for name, _, _ in _VARIANT)


def model_class(info: CheckpointInfo) -> Any:
    """Return the class in transformers' terms: Qwen3ForCausalLM or KaiyuanForCausalLM."""
    if is_variant(info):
        from kaiyuan.checkpoint.modeling_kaiyuan import KaiyuanForCausalLM

        return KaiyuanForCausalLM
    from transformers import Qwen3ForCausalLM

    return Qwen3ForCausalLM


def register_variant() -> None:
    """Let transformers' Auto classes take KaiyuanForCausalLM from here.

    They then load such a model as they load their own, and never run code of its folder.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from kaiyuan.checkpoint.modeling_kaiyuan import KaiyuanConfig, KaiyuanForCausalLM

    AutoConfig.register("kaiyuan", KaiyuanConfig, exist_ok=True)
    AutoModelForCausalLM.register(KaiyuanConfig, KaiyuanForCausalLM, exist_ok=True)


def canonical_model(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return those arguments that make up the model, with defaults filled in.

    Raises:
        UserError: one is missing, or has a value that Qwen3 does not allow.
    """
    full = dict(model)
    if not full.get("group_query_attention"):
        # Megatron then leaves num_query_groups aside.
        full |= {"group_query_attention": True, "num_query_groups": full.get("num_attention_heads")}
    if not full.get("kv_channels"):
        heads = _number(full, "num_attention_heads", int)
        full["kv_channels"] = _number(full, "hidden_size", int) // heads
    for wanted in (_QWEN3, _ABSENT):
        for name, value in wanted.items():
            given = full.get(name, value if wanted is _ABSENT else None)
            if given != value:
                raise UserError(f"the model has {name} = {given!r}; {ARCHITECTURE} needs {value!r}")
    canonical = {name: _number(full, name, kind, default) for name, _, kind, default in _KEYS}
    # A whole number in Megatron, and a fraction with nothing behind the point in transformers.
    canonical["rotary_base"] = _number(full, "rotary_base", int, _ROPE_BASE_DEFAULT)
    canonical["untie_embeddings_and_output_weights"] = bool(
        full.get("untie_embeddings_and_output_weights", False)
    )
    variant = {
        name: _number(full, name, float) if kind is float else bool(full[name])
        for name, _, kind in _VARIANT
        if full.get(name)
    }
    return canonical | _QWEN3 | variant


def _number(
    table: Mapping[str, Any],
    name: str,
    kind: type[int] | type[float],
    default: float | None = None,
) -> Any:
    """Return a number of the model; those that are whole are all counts, and begin at 1."""
    given: Any = table.get(name, default)
    try:
        number = kind(given)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"the model has {name} = {given!r}, which is no number") from None
    if kind is int and number < 1:
        raise UserError(f"the model has {name} = {given!r}, where at least 1 is needed")
    return number


def sizes_of(info: CheckpointInfo) -> Sizes:
    """Return the sizes of a checkpoint's tensors.

    Raises:
        UserError: the model is not one that Qwen3ForCausalLM can be.
    """
    model = canonical_model(info.model)
    return Sizes(
        layers=model["num_layers"],
        hidden=model["hidden_size"],
        ffn=model["ffn_hidden_size"],
        heads=model["num_attention_heads"],
        groups=model["num_query_groups"],
        head_dim=model["kv_channels"],
        vocab=info.vocab_size,
        tied=not model["untie_embeddings_and_output_weights"],
        vocab_divisor=_number(info.model, "make_vocab_size_divisible_by", int, 128),
        sandwich=model.get("sandwich_norm", False),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        UserError: it is not there, or does not hold a configuration.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is not an exported model: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} does not hold a configuration")
    return config


def from_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Return Megatron's arguments and the number of vocabulary entries.

    Raises:
        UserError: it is not a Qwen3, or one with parts that our Megatron model does not have.
    """
    named = config.get("architectures")
    known = [name for name in (ARCHITECTURE, VARIANT) if isinstance(named, list) and name in named]
    if not known:
        raise UserError(
            f"the model is {named}, only {ARCHITECTURE} is known and its variant {VARIANT}"
        )
    unknown = {
        "attention_bias": False,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "quantization_config": None,
    }
    for key, wanted in unknown.items():
        if config.get(key, wanted) != wanted:
            raise UserError(f"the model has {key} = {config[key]!r}; only {wanted!r} is supported")
    lacking = [hf for _, hf, _, _ in _KEYS if hf not in config] + (
        [] if "vocab_size" in config else ["vocab_size"]
    )
    if lacking:
        raise UserError(f"config.json lacks {', '.join(lacking)}")
    # Megatron's own arguments may be texts, see _KEYS; what transformers writes is not.
    for hf, kind in [("vocab_size", int), *((hf, kind) for _, hf, kind, _ in _KEYS)]:
        if type(config[hf]) not in (int, float):
            raise UserError(f"the model has {hf} = {config[hf]!r}, which is no number")
        if kind is int and type(config[hf]) is not int:
            raise UserError(f"the model has {hf} = {config[hf]!r}, which is no whole number")
    model = {name: config[hf] for name, hf, _, _ in _KEYS}
    if VARIANT in known:
        model |= {name: config.get(hf) for name, hf, _ in _VARIANT}
    model["rotary_base"] = _rope_base(config)
    model["untie_embeddings_and_output_weights"] = not config.get("tie_word_embeddings", False)
    # An imported vocabulary has its final size; the padding that training asks for comes on top.
    return canonical_model(model | _QWEN3), _number(config, "vocab_size", int)


def _rope_base(config: Mapping[str, Any]) -> float:
    tables = {name: config.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise UserError(f"the model has {name} = {table!r}, which is no table")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            raise UserError(
                f"the model has rotary embeddings of type {kind!r}; only plain ones work"
            )
    given = [table for table in (*tables.values(), config) if table.get("rope_theta") is not None]
    bases = {_number(table, "rope_theta", float) for table in given}
    if len(bases) != 1:
        raise UserError(
            "config.json must give one base of the rotary embedding (rope_theta or "
            f"rope_parameters); it gives {sorted(bases) or 'none'}"
        )
    base: float = bases.pop()
    if not base.is_integer():
        raise UserError(f"the base of the rotary embedding is {base}; Megatron takes whole numbers")
    return base
