"""How Megatron divides the layers of a model among the stages of a pipeline."""

import re
from collections.abc import Mapping
from typing import Any

from kaiyuan.errors import UserError

Arguments = Mapping[str, Any]

# A letter, or a group in parentheses, and how often it stands there.
_REPEATED = re.compile(r"(?:\((?P<group>[^)]+)\)|(?P<letter>.))\*(?P<times>\d+)")


def layers_of_stages(arguments: Arguments) -> list[list[int]]:
    """Return the layers of each chunk of each stage, without embedding and output layer.

    Stages have one chunk each, or several where the pipeline is interleaved. As
    ``megatron.core.transformer.transformer_block.get_num_layers_to_build`` has it.

    Raises:
        UserError: the layers cannot be divided so, or the layout is none of Megatron's.
    """
    a = arguments
    stages = a.get("pipeline_model_parallel_size", 1)
    layout = a.get("pipeline_model_parallel_layout")
    if layout is not None:
        chunks = _read(layout)
        if sum(chunks) != a["num_layers"] or len(chunks) % stages:
            raise UserError(
                f"pipeline_model_parallel_layout {layout!r} has {sum(chunks)} layers in "
                f"{len(chunks)} parts: it must have all {a['num_layers']} layers, in a multiple of "
                f"{stages} parts (pipeline_model_parallel_size)"
            )
        return [chunks[stage::stages] for stage in range(stages)]
    if stages == 1:
        return [[a["num_layers"]]]
    return _even(a, stages)


def _read(layout: str) -> list[int]:
    """Return the layers (t) between the bars of a layout like ``Et*3|(tt|)*2t*3L``."""
    text = layout.replace(",", "")
    for _ in range(2):  # groups, then the letters within them
        text = _REPEATED.sub(lambda m: (m["group"] or m["letter"]) * int(m["times"]), text)
    inner = text.replace("|", "")
    if not re.fullmatch("Et*L", inner):
        raise UserError(
            f"pipeline_model_parallel_layout {layout!r} must begin with E (the embedding), end "
            "with L (the output layer), and have the layers, t, between; | ends a part"
        )
    return [part.count("t") for part in text.split("|")]


def _even(a: Arguments, stages: int) -> list[list[int]]:
    # The embedding and the output layer can each take the place of a layer.
    embedding = bool(a.get("account_for_embedding_in_pipeline_split"))
    loss = bool(a.get("account_for_loss_in_pipeline_split"))
    first, last = (a.get(f"decoder_{end}_pipeline_num_layers") for end in ("first", "last"))
    others = stages - (first is not None) - (last is not None)
    total = a["num_layers"] + embedding + loss - (first or 0) - (last or 0)
    if total < 0 or (total % others if others else total):
        raise UserError(
            f"{a['num_layers']} layers cannot be divided evenly among {stages} stages "
            "(pipeline_model_parallel_size)"
        )
    each = [total // max(others, 1)] * stages
    each[0], each[-1] = first or each[0], last or each[-1]
    size = a.get("num_layers_per_virtual_pipeline_stage")
    virtual = a.get("num_virtual_stages_per_pipeline_rank") or (each[0] // size if size else 1)
    if virtual < 1 or any(number % virtual for number in each) or (size and each[0] % size):
        raise UserError(f"the {each[0]} layers of a stage cannot be divided evenly among chunks")
    chunks = [[number // virtual] * virtual for number in each]
    chunks[0][0] -= embedding
    chunks[-1][-1] -= loss
    return chunks
