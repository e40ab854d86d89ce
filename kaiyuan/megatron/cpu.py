"""Run Megatron's CUDA-only training loop on a CPU.

Megatron asks torch.cuda for devices, streams, events, memory counters and random states all
over its loop, whatever the back end of torch.distributed is. Without CUDA, :func:`install` gives
each of these names an answer that is right for a CPU: one device, work that is finished when the
call returns, and the CPU's own random generator. With CUDA it does nothing at all.

Every entry names who in Megatron needs it. The list was made for the versions in
``MEGATRON_VERSIONS``; another version is refused, because a name that it needs and that is
missing here would show as an error far from its cause.
"""

import contextlib
import importlib.metadata
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kaiyuan.config import MEGATRON_VERSIONS
from kaiyuan.errors import UserError

CPU = torch.device("cpu")


def install() -> None:
    """Put the stand-in in place, unless CUDA is there or it is already in place.

    Must run before megatron is imported: several of its modules look at torch.cuda when loaded.

    Raises:
        UserError: this version of megatron-core is not one that the stand-in was made for.
    """
    if torch.cuda.is_available():  # also true when the stand-in is in place
        return
    version = importlib.metadata.version("megatron-core")
    if version not in MEGATRON_VERSIONS:
        raise UserError(
            f"megatron-core {version} cannot run without CUDA here, only "
            f"{', '.join(MEGATRON_VERSIONS)}: pip install megatron-core=={MEGATRON_VERSIONS[-1]}"
        )
    # Megatron marks many small functions with torch.compile; on a CPU compiling them costs
    # minutes and asks a CUDA driver for its properties.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in _CUDA_NAMES.items():
        setattr(torch.cuda, name, value)
    # The embedding and the output layer (tensor_parallel/layers.py) ask for the index of the
    # accelerator; the data loader pins memory where there seems to be one.
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.is_available = lambda *_, **__: False
    # training.get_model moves each module to the device.
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    _CudaIsCpu().__enter__()
    _replace_in_megatron()


def is_active() -> bool:
    """Return whether the stand-in is in place."""
    return torch.cuda.Stream is _Stream


class _CudaIsCpu(TorchFunctionMode):
    """Turn the device "cuda" into "cpu" in every call of torch.

    Needed by whoever writes ``device="cuda"``, ``device=torch.cuda.current_device()`` or
    ``.cuda()``: timers, loss logging, the flags of the data loaders, the gradient buffers, RoPE.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if "pin_memory" in kwargs:  # RoPE with context parallelism makes its indices there
            kwargs = {name: x for name, x in kwargs.items() if name != "pin_memory"}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            # Gradient clipping (optimizer/clip_grads.py) asserts a type of torch.cuda.
            return result.replace("torch.", "torch.cuda.")
        return result


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _Stream:
    """A stream whose work is done when the call returns."""

    device = CPU

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...


class _Event:
    """An event that has always happened already."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    # The inference engine times its steps.
    def elapsed_time(self, *_: object) -> float:
        return 0.0


def _answer(value: object = None) -> Callable[..., Any]:
    # A function of its own for each name: torch._dynamo refuses two names for one function.
    return lambda *_, **__: value


_CUDA_NAMES: dict[str, Any] = {
    # initialize_megatron asserts that there is CUDA, checks that each local rank has a device of
    # its own, and sets it. current_device is also an argument of many factory calls.
    "is_available": _answer(True),
    "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    "set_device": _answer(),
    "current_device": _answer(CPU),
    # set_jit_fusion_options and validate_args look at the architecture.
    "get_device_properties": _answer(
        types.SimpleNamespace(name="cpu", major=8, minor=0, total_memory=0, multi_processor_count=1)
    ),
    "get_device_capability": _answer((8, 0)),
    "get_device_name": _answer("cpu"),
    # DDP is built in a side stream; the optimizer and p2p communication wait for streams.
    "Stream": _Stream,
    "Event": _Event,
    "stream": lambda _: contextlib.nullcontext(),
    "current_stream": lambda *_: _Stream(),
    # Timers and p2p communication.
    "synchronize": _answer(),
    # Set-up, evaluation and checkpointing.
    "empty_cache": _answer(),
    # report_memory and training_log.
    "memory_stats": _answer({}),
    "memory_allocated": _answer(0),
    "max_memory_allocated": _answer(0),
    "memory_reserved": _answer(0),
    "max_memory_reserved": _answer(0),
    "device_memory_used": _answer(0),
    "reset_peak_memory_stats": _answer(),
    # The random states in checkpoints, the rerun state machine and the tensor-parallel tracker.
    "get_rng_state": lambda *_, **__: torch.get_rng_state(),
    "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
    # The CUDA-graph checks of the layers and of the random-state tracker.
    "is_current_stream_capturing": _answer(False),
}


def _replace_in_megatron() -> None:
    import megatron.core.tensor_parallel.random as tensor_parallel_random

    # These reach for torch.cuda.default_generators; the tracker forks the generator with them at
    # every embedding and dropout.
    tensor_parallel_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    tensor_parallel_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
