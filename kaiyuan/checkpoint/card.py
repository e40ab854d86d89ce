"""The README.md of an exported model, from what its run wrote down."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kaiyuan.checkpoint.describe import CheckpointInfo
from kaiyuan.checkpoint.hf_config import ARCHITECTURE, VARIANT, canonical_model, is_variant

_HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- kaiyuan
- pretraining
---

# {title}

A base language model ({architecture}, {dtype} weights), pre-trained on Megatron with the kaiyuan
toolkit, which reproduces the training of Kaiyuan-2B (arXiv 2512.07612). It continues texts; it was
not tuned to follow instructions.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("."{trust})
model = AutoModelForCausalLM.from_pretrained(".", dtype="auto"{trust})
inputs = tokenizer("The capital of China is", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
```
"""


def model_card(info: CheckpointInfo, dtype: str) -> str:
    """Return the card as Markdown; it depends on nothing but its arguments."""
    iteration = f"{info.iteration:,}"
    title = f"Checkpoint after {iteration} steps" if info.iteration else "Imported checkpoint"
    variant = is_variant(info)
    head = _HEAD.format(
        title=title,
        dtype=dtype,
        architecture=VARIANT if variant else ARCHITECTURE,
        # Its code lies beside the weights.
        trust=", trust_remote_code=True" if variant else "",
    )
    parts = [head, _model_part(info)]
    if averaged := info.history.get("averaged"):
        rows = zip(averaged["iterations"], averaged["weights"], strict=True)
        parts.append("## Average\n\nThe weights are the mean of these checkpoints.\n")
        parts.append(_table(("step", "weight"), ((f"{i:,}", f"{w:.6g}") for i, w in rows)))
    if phases := info.history.get("phases"):
        parts.append("## Data\n")
        parts.append(_phases_part(phases))
    return "\n".join(parts)


def _model_part(info: CheckpointInfo) -> str:
    grades = info.history.get("grades", {})
    model = canonical_model(info.model) | {"vocab_size": info.vocab_size}
    note = (
        "The grade says how well a value of the original training is known.\n\n" if grades else ""
    )
    header = ("argument of Megatron", "value", *(["grade"] if grades else []))
    rows = (
        (f"`{name}`", str(value), *([grades.get(name, "")] if grades else []))
        for name, value in model.items()
    )
    return f"## Model\n\n{note}{_table(header, rows)}"


# Of a phase, and of Megatron's arguments in it.
_PHASE_KEYS = ("name", "documents", "tokens", "samples", "steps", "content_hash")
_PHASE_ARGUMENTS = ("seq_length", "global_batch_size", "lr_decay_style", "lr", "min_lr")


def _phases_part(phases: Sequence[Mapping[str, Any]]) -> str:
    keys = [key for key in _PHASE_KEYS if any(key in phase for phase in phases)]
    arguments = [phase.get("arguments", {}) for phase in phases]
    argument_keys = [key for key in _PHASE_ARGUMENTS if any(key in a for a in arguments)]
    rows = (
        [_cell(phase.get(key)) for key in keys] + [_cell(a.get(key)) for key in argument_keys]
        for phase, a in zip(phases, arguments, strict=True)
    )
    return _table([key.replace("_", " ") for key in [*keys, *argument_keys]], rows)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
