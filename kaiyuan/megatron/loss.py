"""The cross-entropy of the model's output, in as few passes over the logits as the device allows.

The logits are the largest tensor of a training step (4 sequences of 4096 tokens over 151,936
entries take 10 GB in bf16). Megatron's own cross-entropy makes copies of them in fp32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


def token_losses(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor,
    cap: float | None = None,
    **_: Any,
) -> Tensor:
    """Return the loss of each token; what GPTModel calls as its ``output_processor``.

    Args:
        hidden_states: [sequence, batch, hidden], after the final norm; with sequence parallelism
            this rank's part of the sequence.
        output_layer: Megatron's, which gives this rank's part of the vocabulary.
        output_weight: the embedding where it is also the output layer.
        labels: [batch, sequence].
        cap: of the logits; see :func:`soft_cap`.

    Returns:
        Cross-entropy in nats, fp32, [batch, sequence].
    """
    logits, _ = output_layer(hidden_states, weight=output_weight)
    group = output_layer.tp_group
    losses = cross_entropy(logits, labels.t(), group if group.size() > 1 else None, cap)
    return losses.t().contiguous()


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap) in fp32: no logit leaves (-cap, cap).

    The formula is that of Gemma 2 (arXiv 2408.00118, section 2).
    """
    return cap * torch.tanh(logits.float() / cap)


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: torch.distributed.ProcessGroup | None,
    cap: float | None = None,
) -> Tensor:
    """Return the cross-entropy of each token in nats, fp32, of the shape of ``labels``.

    Args:
        logits: [..., vocabulary, or this rank's part of it]; on CUDA the backward overwrites them.
        labels: [...], ids of the whole vocabulary.
        group: the ranks that share the vocabulary, where there are several.
        cap: of the logits; see :func:`soft_cap`.
    """
    if logits.is_cuda:
        from kaiyuan.megatron import loss_kernels

        return loss_kernels.cross_entropy(logits, labels, group, cap)
    if cap is not None:
        logits = soft_cap(logits, cap)
    if group is not None:
        # It views the labels as one row, which a transposed tensor does not allow.
        return vocab_parallel_cross_entropy(logits, labels.contiguous(), tp_group=group)
    losses = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    return losses.view(labels.shape)


def merge(lse: Tensor, target: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Put together what the ranks found in their parts of the vocabulary.

    Args:
        lse: log of the sum of the exponentials of this rank's logits.
        target: the label's logit on the rank that has it, 0 on the others; summed in place.
        group: the ranks.

    Returns:
        The log of the sum over the whole vocabulary.
    """
    highest = lse.clone()
    torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
    sums = torch.stack([(lse - highest).exp(), target])
    torch.distributed.all_reduce(sums, group=group)
    target.copy_(sums[1])
    return highest + sums[0].log()
