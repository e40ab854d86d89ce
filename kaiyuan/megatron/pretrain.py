"""One phase of training: Megatron's loop with our layers, our data and our records.

Run by kaiyuan/rank.py in every process of a training.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from torch import Tensor

from kaiyuan.data.ends import build_ends
from kaiyuan.data.phase import ConvertedPhase
from kaiyuan.data.samples import OrderedDataset
from kaiyuan.errors import UserError
from kaiyuan.megatron import (
    arguments,
    cpu,
    fallbacks,
    layers,
    loss,
    measure,
    mends,
    nodes,
    overlap,
    records,
)


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
    batch = next(batches)
    documents = None
    if get_args().reset_attention_mask:
        # Here the positions are in the memory of the host still: nothing waits for the device.
        documents = packed_documents(batch["position_ids"])
        batch = {name: x.reshape(1, -1) for name, x in batch.items()}
    batch = {name: x.cuda(non_blocking=True) for name, x in batch.items()}
    if get_args().context_parallel_size > 1:
        ranks = parallel_state.get_context_parallel_group()
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=ranks)
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        packed_seq_params=documents,
        output_processor=partial(loss.token_losses, cap=get_args().output_logit_cap),
    )
    return losses, partial(loss_function, batch["loss_mask"])


def packed_documents(position_ids: Tensor) -> PackedSeqParams:
    """Return the boundaries of documents, across which no token attends, on the device.

    The longest document is given as a whole sample, so that nothing that depends on its length is
    compiled or computed anew for every micro-batch.

    Args:
        position_ids: [batch, sequence], 0 at the first token of each document and each sample.
    """
    begins = torch.nonzero(position_ids.reshape(-1) == 0).view(-1).to(torch.int32)
    bounds = torch.cat([begins, begins.new_tensor([position_ids.numel()])]).cuda(non_blocking=True)
    longest = position_ids.shape[-1]
    return PackedSeqParams("thd", bounds, bounds, max_seqlen_q=longest, max_seqlen_kv=longest)


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
    cache = Path(args.data_cache_path) if args.data_cache_path else None
    if cache and args.local_rank == 0:
        build_ends(phase, cache)
    nodes.check_same(phase.content_hash, f"the data in {phase.folder}")
    if args.save:
        nodes.check_shared(Path(args.save))
    return (
        OrderedDataset(phase, args.seq_length, cache, reset_positions=args.reset_attention_mask),
        None,
        None,
    )


# Every tensor-parallel rank reads the (memory-mapped) data itself; nothing is broadcast.
provide_datasets.is_distributed = True  # type: ignore[attr-defined]


def run(argv: Sequence[str]) -> None:
    """Train with these Megatron arguments."""
    if cpu.is_active():
        argv = [*arguments.CPU_ARGUMENTS, *argv]
    else:
        fallbacks.install()
    mends.install()
    overlap.install()
    args = arguments.parse(argv)
    mends.leave_out(args)
    model_config = gpt_config_from_args(args)
    if args.transformer_impl == "local":
        model_config.transformer_layer_spec = partial(
            layers.block_spec, sandwich_norm=args.sandwich_norm
        )
    if args.record_to:
        records.install(args)
    config = pretrain_cfg_container_from_args(args, model_config)
    watch = measure.Stopwatch(args.measure_seconds) if args.measure_to else None
    if watch:
        watch.install()
    provider = measure.provide_random if args.data_path == [measure.RANDOM] else provide_datasets
    forward = watch.forward(forward_step) if watch else forward_step
    pretrain(config, provider, ModelType.encoder_or_decoder, forward)
    if watch:
        watch.write(Path(args.measure_to))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
