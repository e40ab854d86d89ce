"""Memory and time of a training step, from arithmetic on Megatron's arguments.

Memory counts the tensors that our layers keep (kaiyuan/megatron/layers.py and its kernels) and is
to be held against ``torch.cuda.max_memory_allocated``. Time divides operations and bytes by rates
that were measured on one H200 (docs/performance.md); one calibration fits them to another machine.

Elements are those of a micro-batch's tokens on one tensor-parallel rank.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kaiyuan.errors import UserError
from kaiyuan.estimate import attention_sizes, padded_vocab_size, parameter_table
from kaiyuan.profiling.stages import layers_of_stages

Arguments = Mapping[str, Any]
GIB = 2**30

# torch keeps a cuBLAS workspace of this size on Hopper for each of the two threads that multiply:
# the main one and autograd's.
_WORKSPACES = 2 * 32 * 2**20
# Beside what torch allocates: the CUDA context and the kernels of the libraries.
CONTEXT = 1 * GIB


def _is_half(a: Arguments) -> bool:
    return bool(a.get("bf16") or a.get("fp16"))


def _width(a: Arguments) -> int:
    """Return the bytes of a weight or activation."""
    return 2 if _is_half(a) else 4


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model is split: sizes of the groups, and what a stage holds.

    Attributes:
        tensor: tensor-parallel size.
        sequence: by how much the residual stream is split.
        pipeline: number of stages.
        chunks: layers of each chunk of each stage.
        tokens: of a micro-batch on one rank.
    """

    tensor: int
    sequence: int
    pipeline: int
    chunks: list[list[int]]
    tokens: int

    @classmethod
    def of(cls, a: Arguments) -> "Layout":
        """Return the layout that arguments give."""
        tensor = a.get("tensor_model_parallel_size", 1)
        return cls(
            tensor=tensor,
            sequence=tensor if a.get("sequence_parallel") else 1,
            pipeline=a.get("pipeline_model_parallel_size", 1),
            chunks=layers_of_stages(a),
            tokens=a["micro_batch_size"] * a["seq_length"] // a.get("context_parallel_size", 1),
        )

    @property
    def virtual(self) -> int:
        """Return the number of chunks a stage."""
        return len(self.chunks[0])

    def in_flight(self, stage: int, micro_batches: int) -> int:
        """Return the chunks whose activations a stage holds at once at most (1F1B schedule)."""
        if self.pipeline == 1:
            return 1
        behind = self.pipeline - stage - 1
        warm_up = behind if self.virtual == 1 else 2 * behind + (self.virtual - 1) * self.pipeline
        return min(warm_up + 1, micro_batches * self.virtual)


# ---- Memory ----


def saved_by_layer(a: Arguments) -> dict[str, float]:
    """Return the elements a token that a layer keeps for its backward, without recomputation.

    Where an operation keeps the output of the one before it, it is counted once; the value is a
    view of the projection.
    """
    layout = Layout.of(a)
    queries, keys = (size / layout.tensor for size in attention_sizes(a))
    hidden, ffn = a["hidden_size"] / layout.sequence, a["ffn_hidden_size"] / layout.tensor
    heads = a["num_attention_heads"] / layout.tensor
    after = hidden if a.get("sandwich_norm") else 0  # kept by the norms after the branches
    return {
        "input": hidden,  # kept by the norm
        "input, normalised": hidden,  # by the projection
        "query, key, value": queries + 2 * keys,  # by the norm and rotation of query and key
        "query, key, rotated": queries + keys,  # by attention
        "attention": queries,  # by itself and the output projection
        "attention, log-sum-exp": heads * 4 / _width(a),  # fp32
        "input of the MLP": hidden,
        "input of the MLP, normalised": hidden,
        "gate and up": 2 * ffn,  # by SwiGLU
        "SwiGLU": ffn,  # by the last product
        "output of attention": after,
        "output of the MLP": after,
    }


def recomputed(a: Arguments) -> set[str]:
    """Return which of `saved_by_layer` selective recomputation drops."""
    modules = _modules(a)
    dropped: set[str] = set()
    if "mlp" in modules:
        dropped |= {"gate and up", "SwiGLU", "output of the MLP"}
    if "core_attn" in modules:
        dropped |= {"attention, log-sum-exp"}
    return dropped


def _modules(a: Arguments) -> list[str]:
    if a.get("recompute_granularity") != "selective" and not a.get("recompute_activations"):
        return []
    modules = a.get("recompute_modules") or "core_attn"  # Megatron's default
    return [modules] if isinstance(modules, str) else list(modules)


def _kept_by_layer(a: Arguments) -> float:
    """Return the elements a token that a layer keeps which is not recomputed as a whole."""
    saved = saved_by_layer(a)
    kept = sum(saved.values()) - sum(saved[name] for name in recomputed(a))
    if "core_attn" in _modules(a) and a.get("qk_layernorm"):
        # Its checkpoint takes Megatron's own way through the projection, which copies query and
        # key for their norms.
        kept += saved["query, key, rotated"]
    return kept


def _full(a: Arguments, layers: int) -> tuple[int, int]:
    """Return how many layer inputs a chunk keeps alone, and how many layers are redone at once."""
    if a.get("recompute_granularity") != "full":
        return 0, 0
    number = a.get("recompute_num_layers") or 1
    if a.get("recompute_method") == "block":
        return min(number, layers), 1
    return -(-layers // number), min(number, layers)


def _chunk_elements(a: Arguments, layers: int) -> float:
    """Return the elements a token that a chunk of so many layers keeps."""
    inputs, at_once = _full(a, layers)
    whole = layers
    if at_once:
        whole = whole - inputs if a.get("recompute_method") == "block" else 0
    return inputs * saved_by_layer(a)["input"] + whole * _kept_by_layer(a)


def _layer_backward(a: Arguments, layers: int) -> float:
    """Return the elements a token that come and go in the backward of a layer of a chunk.

    The most is held in SwiGLU's backward: the gradient of the residual stream, and of gate and up;
    what is recomputed is held besides.
    """
    if not layers:
        return 0.0
    saved = saved_by_layer(a)
    inputs, at_once = _full(a, layers)
    again = sum(saved[name] for name in recomputed(a)) if "mlp" in _modules(a) else 0.0
    if a.get("recompute_method") == "block" and inputs < layers:
        at_once = 0  # the layers that are not redone come first, and hold as much
    if at_once:
        again += at_once * sum(saved.values()) - saved["input"]
    output = saved["input"] if again else 0.0  # computed again though nothing needs it
    return again + output + saved["input"] + saved["gate and up"]


def _stage_parameters(a: Arguments, stage: int) -> float:
    """Return the parameters of one rank of a stage."""
    layout, table = Layout.of(a), parameter_table(a)
    embedding, norms = table["token embedding"], table["norms"]
    products = sum(size for part, size in table.items() if part.startswith(("attention", "MLP")))
    share = sum(layout.chunks[stage]) / a["num_layers"]
    local = (products / layout.tensor + norms) * share
    if stage == 0:
        local += embedding / layout.tensor
    if stage == layout.pipeline - 1:
        tied = embedding if layout.pipeline > 1 else 0  # its copy of the embedding
        local += (table["output layer"] or tied) / layout.tensor
    return local


def memory_table(a: Arguments, data_parallel: int) -> dict[str, int]:
    """Return the bytes that torch allocates on the fullest GPU at its peak, by part.

    `CONTEXT` comes on top, and what the allocator holds without using it.

    Args:
        a: arguments of the phase.
        data_parallel: number of data-parallel ranks.
    """
    stages = range(Layout.of(a).pipeline)
    tables = [_stage_memory(a, stage, data_parallel) for stage in stages]
    return max(tables, key=lambda table: sum(table.values()))


def _stage_memory(a: Arguments, stage: int, data_parallel: int) -> dict[str, int]:
    layout, width = Layout.of(a), _width(a)
    parameters = _stage_parameters(a, stage)
    shards = _copies(a, data_parallel) if a.get("use_distributed_optimizer") else 1
    gradient = _gradient_width(a)
    micro_batches = max(1, a["global_batch_size"] // (a["micro_batch_size"] * data_parallel))
    layers = layout.chunks[stage]
    chunks = [layout.tokens * width * _chunk_elements(a, number) for number in layers]
    # More are in flight than there are, so that all of them are, about as often.
    activations = sum(chunks) / len(chunks) * layout.in_flight(stage, micro_batches)
    rows = padded_vocab_size(a) / layout.tensor
    hidden = a["hidden_size"]
    table = rows * hidden * width  # a gradient of the embedding or the output layer
    # What is held besides, at the moments that can be the peak, with the activations then.
    moments: list[tuple[float, float, float]] = [
        (activations, 0, layout.tokens * width * _layer_backward(a, max(layers))),
        # A fp32 copy of the gradients, where they are not fp32, at the optimizer's step.
        (0, 0, parameters * 4 / shards if gradient < 4 else 0),
    ]
    if stage == 0:
        moments.append((activations - chunks[0], 0, table + layout.tokens * width * hidden))
    if stage == layout.pipeline - 1:
        # The logits, whose gradient takes their place, between input and output of the final norm,
        # the gradient of the latter, and one for the weight, which is made though not read.
        logits = layout.tokens * width * rows
        ends = layout.tokens * width * hidden * (2 / layout.sequence + 1)
        moments.append((activations, logits, ends + table))
    kept, logits, work = max(moments, key=sum)
    gathered = layout.tokens * width * hidden if layout.sequence > 1 else 0
    return {
        "parameters": round(parameters * width),
        "gradients": round(parameters * gradient),
        # Half precision: a master copy and two moments, fp32; without: the moments alone.
        "optimizer states": round(parameters * (12 if _is_half(a) else 8) / shards),
        "activations of the layers": round(kept),
        "logits": round(logits),
        "gradients and recomputed layers in flight": round(work),
        "workspaces": round(_WORKSPACES + gathered),
    }


def _copies(a: Arguments, data_parallel: int) -> int:
    """Return the ranks that have the same parameters: those with other samples or other tokens."""
    return data_parallel * int(a.get("context_parallel_size", 1))


def _gradient_width(a: Arguments) -> int:
    """Return the bytes of a gradient in Megatron's buffer."""
    if not _is_half(a) or a.get("accumulate_allreduce_grads_in_fp32"):
        return 4
    return 2 if a.get("fp16") or a.get("grad_reduce_in_bf16") else 4


# ---- Time ----


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a GPU reaches in a training, from the profile in docs/performance.md (one H200).

    Attributes:
        products: operations a second in matrix products.
        attention: the same in attention, counted as `kaiyuan.estimate.flops_per_token` counts.
        bytes: a second, in all that lies between.
        link: bytes a second and direction to the other GPUs of the machine; not measured here.
        idle: seconds a step in which the GPU waits for the host.
        slowdown: measured seconds for one estimated; the calibration.
    """

    products: float = 723e12
    attention: float = 397e12
    bytes: float = 3.35e12
    link: float = 350e9
    idle: float = 0.034
    slowdown: float = 1.0


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of a step: so many for each micro-batch, and the rest."""

    micro_batch: float
    rest: float

    def step(self, micro_batches: int) -> float:
        """Return the seconds of a step of so many micro-batches (of one rank)."""
        return micro_batches * self.micro_batch + self.rest


def step_time(a: Arguments, data_parallel: int, rates: Rates | None = None) -> StepTime:
    """Estimate the time of a step.

    Args:
        a: arguments of the phase.
        data_parallel: number of data-parallel ranks.
        rates: of the GPU.
    """
    rates = rates or Rates()
    layout = Layout.of(a)
    stages = [_stage_seconds(a, stage, rates) for stage in range(layout.pipeline)]
    micro_batch = max(stages)
    # The pipeline fills and empties once a step; virtual stages shorten it.
    bubble = micro_batch * (layout.pipeline - 1) / layout.virtual
    parameters = max(_stage_parameters(a, stage) for stage in range(layout.pipeline))
    copies = _copies(a, data_parallel)
    shards = copies if a.get("use_distributed_optimizer") else 1
    # Norm of the gradients, scaling, AdamW on four fp32 values, weights: 42 bytes each; the
    # gradients are set to zero.
    optimizer = parameters * (42 / shards + _gradient_width(a)) / rates.bytes
    rest = bubble + optimizer + rates.idle + _reduction(a, parameters, copies, stages, rates)
    return StepTime(micro_batch * rates.slowdown, rest * rates.slowdown)


def _stage_seconds(a: Arguments, stage: int, rates: Rates) -> float:
    """Return the seconds of a micro-batch on a stage."""
    layout, width = Layout.of(a), _width(a)
    layers = sum(layout.chunks[stage])
    table = parameter_table(a)
    again = sum(_redone_layers(a, number) for number in layout.chunks[stage])
    # Operations: forward twice a parameter and token, backward twice as many.
    attention_weights = table["attention: query, key, value"] + table["attention: output"]
    mlp = table["MLP: gate and up"] + table["MLP: down"]
    each = (attention_weights + mlp) / a["num_layers"] / layout.tensor
    mlp_each = mlp / a["num_layers"] / layout.tensor
    weights = each * layers
    products = 6 * weights + 2 * each * again
    if "mlp" in _modules(a):
        products += 2 * mlp_each * layers
    queries = attention_sizes(a)[0] / layout.tensor
    scores = 2 * queries * a["seq_length"] * (3 * layers + 0.75 * again)  # its forward: a quarter
    if "core_attn" in _modules(a):
        scores += 2 * queries * a["seq_length"] * 0.75 * layers
    moved = _moved(a, layout, layers, again)
    # Each micro-batch reads the weights twice and adds to their fp32 gradients.
    per_batch = 12.0 * weights
    rows = padded_vocab_size(a) / layout.tensor
    if stage == 0:
        per_batch += 14.0 * rows * a["hidden_size"]  # a dense gradient, which is then added
    if stage == layout.pipeline - 1:
        products += 6 * rows * a["hidden_size"]
        per_batch += 12.0 * rows * a["hidden_size"]
        moved += 3 * rows
    seconds = layout.tokens * (
        products / rates.products + scores / rates.attention + moved * width / rates.bytes
    )
    return seconds + per_batch / rates.bytes + _tensor_parallel(a, layout, layers + again, rates)


def _redone_layers(a: Arguments, layers: int) -> int:
    """Return the layers of a chunk whose forward is done again as a whole."""
    inputs, at_once = _full(a, layers)
    if not at_once:
        return 0
    return inputs if a.get("recompute_method") == "block" else layers


def _moved(a: Arguments, layout: Layout, layers: float, again: float) -> float:
    """Return the elements a token that are read and written between the matrix products."""
    queries, keys = (size / layout.tensor for size in attention_sizes(a))
    hidden, ffn = a["hidden_size"] / layout.sequence, a["ffn_hidden_size"] / layout.tensor
    modules = _modules(a)
    # Forward: two norms and two additions, norm and rotation of query and key, SwiGLU.
    forward = 4 * hidden + 6 * hidden + 2 * (queries + keys) + 3 * ffn
    # With selective recomputation the residual's gradient is added after the norm, not in it.
    norms = 12 * hidden if modules else 8 * hidden
    backward = norms + (queries + 2 * keys) + (queries + keys) + (queries + 2 * keys) + 5 * ffn
    if "mlp" in modules:
        backward += 3 * ffn
    if a.get("sandwich_norm"):
        forward, backward = forward + 4 * hidden, backward + 6 * hidden
    return forward * (layers + again) + backward * layers


def _tensor_parallel(a: Arguments, layout: Layout, layers: float, rates: Rates) -> float:
    """Return the seconds of communication within the layers: two sums forward, two backward."""
    if layout.tensor == 1:
        return 0.0
    each = layout.tokens * a["hidden_size"] * _width(a)
    share = (layout.tensor - 1) / layout.tensor
    # A sum is a reduce-scatter and an all-gather; with sequence parallelism the backward gathers
    # two inputs once more.
    times = 8 + (2 if layout.sequence > 1 else 0)
    return layers * times * each * share / rates.link


def _reduction(
    a: Arguments, parameters: float, copies: int, stages: list[float], rates: Rates
) -> float:
    """Return the seconds of the data-parallel communication that nothing hides."""
    share = (copies - 1) / copies
    reduce = parameters * _gradient_width(a) * share / rates.link
    gather = parameters * _width(a) * share / rates.link
    # What overlaps has the last backward, or the first forward, to hide in.
    if a.get("overlap_grad_reduce"):
        reduce = max(0.0, reduce - max(stages) * 2 / 3)
    if a.get("overlap_param_gather"):
        gather = max(0.0, gather - max(stages) / 3)
    return reduce + gather


def read_calibration(path: Path) -> Rates:
    """Return the rates that a sweep of `kaiyuan profile` fitted.

    Raises:
        UserError: the file cannot be read or is no calibration.
    """
    try:
        slowdown = float(json.loads(path.read_text(encoding="utf-8"))["slowdown"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a calibration: {error}") from error
    if not 0 < slowdown < float("inf"):
        raise UserError(f"{path}: slowdown must be a number above 0, not {slowdown}")
    return Rates(slowdown=slowdown)
