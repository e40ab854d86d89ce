"""Megatron's own argument parser, with errors that a person can act on."""

import argparse
import contextlib
import difflib
import functools
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import NoReturn

from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import add_megatron_arguments, parse_and_validate_args
from megatron.training.global_vars import destroy_global_vars

from kaiyuan.config import OWN_ARGUMENTS, option
from kaiyuan.errors import UserError
from kaiyuan.megatron import cpu

# What Megatron's defaults take for granted and a CPU cannot give; they stand before the run's own
# arguments, which may say otherwise. Loader workers are not worth their start here.
CPU_ARGUMENTS = (
    "--distributed-backend=gloo",
    "--use-cpu-initialization",
    "--no-gradient-accumulation-fusion",
    "--num-workers=0",
)


def add_own_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments that our entry point has beside Megatron's."""
    group = parser.add_argument_group(title="kaiyuan")
    for name, (kind, text) in OWN_ARGUMENTS.items():
        if kind is bool:
            group.add_argument(option(name), action="store_true", help=text)
        else:
            group.add_argument(option(name), type=kind, help=text)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"Megatron does not take these arguments: {message}")


@functools.cache
def build_parser() -> argparse.ArgumentParser:
    """Return Megatron's parser with our arguments, whose errors are UserErrors."""
    return add_own_arguments(add_megatron_arguments(_Parser(allow_abbrev=False)))


def option_names() -> dict[str, str]:
    """Return all option names of Megatron, each with "flag" or "value"."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {
        name: "flag" if action.nargs == 0 else "value"
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and name != "--help"
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and validate with Megatron's own functions; sets Megatron's global arguments.

    Raises:
        UserError: an unknown name (with the nearest known one), a value of the wrong type, or a
            combination that Megatron's validation refuses, or our forward step cannot do.
    """
    _, unknown = build_parser().parse_known_args(argv)
    if unknown:
        known = list(option_names())
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"Megatron has no argument {unknown[0]}{hint}")
    # Megatron reads sys.argv itself.
    before = sys.argv
    sys.argv = [before[0], *argv]
    try:
        with _refusals():
            args = parse_and_validate_args(extra_args_provider=add_own_arguments)
    finally:
        sys.argv = before
    _check_document_masks(args)
    return args


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Say in one sentence what Megatron has against its arguments."""
    try:
        yield
    except (AssertionError, ValueError, RuntimeError) as error:
        # Some of its assertions say nothing; their line says what had to hold.
        text = str(error) or traceback.extract_tb(error.__traceback__)[-1].line or ""
        reason = re.sub(r"\s+", " ", text)
        raise UserError(f"Megatron refuses this combination of arguments: {reason}") from error


def _check_document_masks(args: argparse.Namespace) -> None:
    if args.reset_position_ids != args.reset_attention_mask:
        raise UserError(
            "reset_position_ids and reset_attention_mask must be given together: rotary positions "
            "are relative, so that counting anew means something only where documents are apart"
        )
    stages, samples = args.pipeline_model_parallel_size, args.micro_batch_size
    if args.reset_attention_mask and stages > 1 and samples > 1:
        raise UserError(
            "reset_attention_mask with pipeline_model_parallel_size > 1 needs micro_batch_size=1: "
            "the samples of a micro-batch are laid end to end"
        )
    if args.reset_attention_mask and args.context_parallel_size > 1:
        raise UserError(
            "reset_attention_mask needs context_parallel_size=1: documents that are kept apart are "
            "not split among GPUs"
        )


def refused(phases: dict[str, tuple[int, list[str]]]) -> dict[str, str]:
    """Return why command lines are refused, by their names; those that are not are left out.

    Args:
        phases: for each name the number of processes and the command line.
    """
    reasons = {}
    for name, (processes, argv) in phases.items():
        os.environ["WORLD_SIZE"] = str(processes)
        # Parsing fills Megatron's global variables, once a process.
        destroy_global_vars()
        destroy_num_microbatches_calculator()
        try:
            args = parse([*CPU_ARGUMENTS, *argv] if cpu.is_active() else argv)
            with _refusals():
                pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        except UserError as error:
            reasons[name] = str(error)
    return reasons


def main() -> None:
    """Print the option names, as kept in ``kaiyuan/megatron_arguments.txt``.

    With ``--check``, read command lines as JSON from the standard input and print those that are
    refused, with the reasons.
    """
    with contextlib.redirect_stdout(sys.stderr):
        if sys.argv[1:] == ["--check"]:
            answer = json.dumps(refused(json.load(sys.stdin)))
        else:
            answer = "\n".join(f"{name} {kind}" for name, kind in sorted(option_names().items()))
    print(answer)


if __name__ == "__main__":
    main()
