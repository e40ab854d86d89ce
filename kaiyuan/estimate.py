"""What a model weighs: parameters, floating-point operations and checkpoints.

Plain arithmetic on Megatron's arguments for the models that this project trains: decoder layers
with grouped-query attention, RMSNorm and SwiGLU, without biases.
"""

import math
from collections.abc import Mapping
from typing import Any

Arguments = Mapping[str, Any]


def padded_vocab_size(arguments: Arguments) -> int:
    """Return the rows of the embeddings: the vocabulary, padded as Megatron does.

    The multiple is ``make_vocab_size_divisible_by`` times the tensor-parallel size.
    """
    multiple = arguments.get("make_vocab_size_divisible_by", 128)
    multiple *= arguments.get("tensor_model_parallel_size", 1)
    return int(math.ceil(arguments["vocab_size"] / multiple) * multiple)


def attention_sizes(a: Arguments) -> tuple[int, int]:
    """Return the sizes of all queries and of all keys of a token."""
    heads = a["num_attention_heads"]
    size = a.get("kv_channels") or a["hidden_size"] // heads
    groups = a["num_query_groups"] if a.get("group_query_attention") else heads
    return heads * size, groups * size


def parameter_table(arguments: Arguments) -> dict[str, int]:
    """Return the number of parameters of each part of a model; their sum is exact."""
    a = arguments
    hidden, layers = a["hidden_size"], a["num_layers"]
    queries, keys = attention_sizes(a)
    head = queries // a["num_attention_heads"]
    rows = padded_vocab_size(a)
    norms = hidden * (4 if a.get("sandwich_norm") else 2)
    norms += 2 * head if a.get("qk_layernorm") else 0
    return {
        "token embedding": rows * hidden,
        "attention: query, key, value": layers * hidden * (queries + 2 * keys),
        "attention: output": layers * queries * hidden,
        "MLP: gate and up": layers * hidden * 2 * a["ffn_hidden_size"],
        "MLP: down": layers * a["ffn_hidden_size"] * hidden,
        "norms": layers * norms + hidden,
        "output layer": (rows * hidden if a.get("untie_embeddings_and_output_weights") else 0),
    }


def num_parameters(arguments: Arguments) -> int:
    """Return the number of all parameters, the rows that pad the vocabulary included."""
    return sum(parameter_table(arguments).values())


def flops_per_token(arguments: Arguments) -> int:
    """Return the floating-point operations that training needs for a token.

    Convention: that of Megatron's own count. A multiplication with an addition is two operations;
    only matrix products count, forward once and backward twice; the output layer counts, the
    embedding look-up does not; attention counts as causal (half of the score matrix); recomputed
    activations do not count.
    """
    a = arguments
    hidden = a["hidden_size"]
    queries, keys = attention_sizes(a)
    layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * a["ffn_hidden_size"]
    # Scores and weighted values: 2 products of S/2 keys on average for each query.
    attention = queries * a["seq_length"]
    products = a["num_layers"] * (layer + attention) + hidden * padded_vocab_size(a)
    return 6 * products


def checkpoint_bytes(arguments: Arguments) -> int:
    """Return the size of a checkpoint: weights, and master copy and two moments in fp32."""
    width = 2 if arguments.get("bf16") or arguments.get("fp16") else 4
    return num_parameters(arguments) * (width + 12)


# Peak of dense bf16 matrix products in 10^12 operations a second, from NVIDIA's data sheets; the
# first name that the GPU's name contains counts.
_PEAKS = {
    "B300": 2250.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "H20": 148.0,
    "H200": 989.4,
    "GH200": 989.4,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "H800": 989.4,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def peak_tflops(gpu: str) -> float | None:
    """Return the peak of a GPU in bf16 by its name, None where it is not known."""
    words = gpu.replace("-", " ").split()
    for name, peak in _PEAKS.items():
        if all(word in words for word in name.split()):
            return peak
    return None
