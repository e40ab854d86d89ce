"""One phase of training: Megatron's loop with our layers, our data and our records.

Run by kaiyuan/rank.py in every process of a training.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from torch import Tensor

from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.errors import UserError
from kaiyuan.megatron import arguments, cpu, fallbacks, layers, loss, mends, records
from kaiyuan.megatron.dataset import OrderedDataset


def loss_function(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses of a micro-batch.

    Args:
        loss_mask: [batch, sequence]; 1 where a token counts.
        losses: [batch, sequence], cross-entropy in nats.

    Returns:
        The sum, the number of tokens that count (Megatron divides by it once all micro-batches
        and ranks have been added up), and both for the log.
    """
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.float()])}


def forward_step(batches: Iterator[dict[str, Tensor]], model: torch.nn.Module) -> tuple[Any, Any]:
    """Run the model on the next micro-batch; return its output and the loss function."""
    batch = {name: x.cuda(non_blocking=True) for name, x in next(batches).items()}
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        output_processor=loss.token_losses,
    )
    return losses, partial(loss_function, batch["loss_mask"])


def provide_datasets(
    _num_samples: Sequence[int], vp_stage: int | None = None
) -> tuple[OrderedDataset, None, None]:
    """Return the phase that ``--data-path`` names; the samples are what the data gives."""
    args = get_args()
    phase = ConvertedPhase.open(Path(args.data_path[0]))
    if phase.vocab_size > args.padded_vocab_size:
        raise UserError(
            f"{phase.folder} was made with a vocabulary of {phase.vocab_size} entries, "
            f"the model has {args.padded_vocab_size}"
        )
    return OrderedDataset(phase, args.seq_length), None, None


# Every tensor-parallel rank reads the (memory-mapped) data itself; nothing is broadcast.
provide_datasets.is_distributed = True  # type: ignore[attr-defined]


def run(argv: Sequence[str]) -> None:
    """Train with these Megatron arguments."""
    if cpu.is_active():
        argv = [*argv, *arguments.CPU_ARGUMENTS]
    else:
        fallbacks.install()
    mends.install()
    args = arguments.parse(argv)
    if args.context_parallel_size > 1:
        raise UserError("context_parallel_size must be 1: our attention does not split sequences")
    model_config = gpt_config_from_args(args)
    if args.transformer_impl == "local":
        model_config.transformer_layer_spec = layers.block_spec
    if args.record_to:
        records.install(Path(args.record_to), args.phase_name)
    config = pretrain_cfg_container_from_args(args, model_config)
    pretrain(config, provide_datasets, ModelType.encoder_or_decoder, forward_step)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
