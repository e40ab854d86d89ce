"""Checks that only all processes together can make."""

import secrets
from pathlib import Path

import torch

from kaiyuan.errors import UserError


def check_same(value: str, what: str) -> None:
    """Raise a UserError where processes see different values of the same thing."""
    values: list[str] = [""] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        raise UserError(
            f"{what} is not the same everywhere: ranks {', '.join(map(str, different))} see other "
            "data than rank 0"
        )


def check_shared(folder: Path) -> None:
    """Raise a UserError where a file that rank 0 writes is not seen by all other ranks.

    A checkpoint has to be read by machines that did not write it.
    """
    name = [secrets.token_hex(8)]
    torch.distributed.broadcast_object_list(name, src=0)
    mark = folder / f".seen-{name[0]}"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    torch.distributed.barrier()
    seen: list[bool] = [False] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(seen, mark.exists())
    if torch.distributed.get_rank() == 0:
        mark.unlink()
    blind = [rank for rank, yes in enumerate(seen) if not yes]
    if blind:
        raise UserError(
            f"{folder} is not shared: ranks {', '.join(map(str, blind))} do not see what rank 0 "
            "writes there; all machines need the same folder"
        )
