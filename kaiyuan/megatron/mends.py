"""Faults of Megatron 0.19.2 that stand in our way, mended from outside."""

import queue
from typing import Any

import megatron.core.datasets.utils as dataset_utils
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer import optimizer as base_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import training


def install() -> None:
    """Mend all of them; must run before ``pretrain``."""
    # initialize_megatron runs make in the installed package, to build an index builder that comes
    # built in the wheel and that our dataset has no use for; where make fails, it ends the process.
    dataset_utils.compile_helpers = lambda: None
    # The threads that write a checkpoint report through a queue of another process even where
    # nothing is saved asynchronously. It is started at the first save and imports torch: 2 s on a
    # laptop, 10 s where disks are slow; and a save fails if it has been ended.
    filesystem_async._results_queue = queue.Queue()
    if not distrib_optimizer.HAVE_APEX_OR_TE:
        DistributedOptimizer.sharded_state_dict = _with_state(
            DistributedOptimizer.sharded_state_dict
        )
        DistributedOptimizer.load_state_dict = _with_own_steps(DistributedOptimizer.load_state_dict)
    DistributedOptimizer.load_state_dict = _with_own_options(DistributedOptimizer.load_state_dict)
    DistributedOptimizer._set_main_param_and_optimizer_states = _writable(
        DistributedOptimizer._set_main_param_and_optimizer_states
    )
    for module in (base_optimizer, distrib_optimizer):
        keys = [k for k in module.param_group_identifier_keys if k not in ("max_lr", "min_lr")]
        module.param_group_identifier_keys = tuple(keys)
    OptimizerParamScheduler.load_state_dict = _with_own_rates(
        OptimizerParamScheduler.load_state_dict
    )


def leave_out(args: Any) -> None:
    """Pass over the data of the steps in ``args.iterations_to_skip``; must run after parsing.

    Megatron's own way does not look whether a phase ends with the step, so that the phase would go
    on with data of the next; draws data on one tensor-parallel rank alone, though ours read them
    themselves; and fails where there are several model chunks. Here it is a step that was not
    taken, like one in fp16 whose gradient overflows.
    """
    steps = set(args.iterations_to_skip or ())
    args.iterations_to_skip = []
    train_step = training.train_step

    def wrapped(forward: Any, data: Any, *rest: Any, **more: Any) -> Any:
        if args.curr_iteration + 1 not in steps:
            return train_step(forward, data, *rest, **more)
        while get_rerun_state_machine().should_run_forward_backward(data):
            for batches in data if isinstance(data, list) else [data]:
                for _ in range(get_num_microbatches()):
                    next(batches)
        # no losses, skipped, neither save nor exit, and nothing to log
        return {}, 1, False, False, None, None, None, 0

    if steps:
        training.train_step = wrapped


def _with_state(sharded_state_dict: Any) -> Any:
    """Give the optimizer its state before Megatron asks for the layout of a checkpoint to load.

    Without Apex and TransformerEngine, ``state_dict`` asserts that the state of torch's AdamW has
    a step number. The state is made by the first step only, so that no checkpoint can be loaded.
    A step with zero gradients makes it; all that it changes is loaded afterwards.
    """

    def wrapped(self: Any, model_state: Any = None, is_loading: bool = False, **more: Any) -> Any:
        if is_loading and not self.optimizer.state:
            self._init_optimizer_states_with_dummy_values()
        return sharded_state_dict(self, model_state, is_loading, **more)

    return wrapped


def _with_own_steps(load_state_dict: Any) -> Any:
    """Give each parameter a step number of its own after loading.

    Megatron hands one tensor to all of them, and torch's AdamW counts it up once a parameter: after
    a resume, the bias correction of Adam is that of many more steps than were taken.
    """

    def wrapped(self: Any, state: dict[str, Any]) -> None:
        load_state_dict(self, state)
        for values in self.optimizer.state.values():
            values["step"] = values["step"].clone()

    return wrapped


def _with_own_options(load_state_dict: Any) -> Any:
    """Let torch's AdamW and the FusedAdam of TransformerEngine or Apex load each other's state.

    Megatron puts the parameter groups of the checkpoint in the place of the optimizer's. Then
    FusedAdam lacks its option ``bias_correction``, and its step number, which its kernel takes as
    an integer, is torch's float. So an option that the optimizer does not have is left out, and
    what the checkpoint does not say stays as it is.
    """

    def wrapped(self: Any, state: dict[str, Any]) -> None:
        own = {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"}
        state["optimizer"]["param_groups"] = [
            own
            | {k: v for k, v in group.items() if k in own}
            | ({"step": int(group["step"])} if "step" in group else {})
            for group in state["optimizer"]["param_groups"]
        ]
        load_state_dict(self, state)

    return wrapped


def _writable(set_states: Any) -> Any:
    """Let loading write parameters and optimizer states.

    In fp32 the optimizer's parameters are views of the model's, which autograd refuses to write
    to. And torch's AdamW has a state "step", which Megatron sets elsewhere but looks for here.
    """

    @torch.no_grad()
    def wrapped(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        set_states(self, model_param, {"step": None, **tensors})

    return wrapped


def _with_own_rates(load_state_dict: Any) -> Any:
    """Let a phase begin with a learning rate of its own.

    Megatron keeps the highest and lowest rate in each parameter group, finds the groups of a
    checkpoint by them (KeyError where the phase before had another rate) and, where it finds
    them, goes on with the old rates in spite of ``--override-opt-param-scheduler``. So the rates
    are no part of a group's identity here, and loading sets those of the scheduler again. All
    parameters of our models have the same rate.
    """

    def wrapped(self: Any, state: dict[str, Any]) -> None:
        if self.override_opt_param_scheduler:
            for group in self.optimizer.param_groups:
                group["max_lr"], group["min_lr"] = self.max_lr, self.min_lr
        load_state_dict(self, state)

    return wrapped
