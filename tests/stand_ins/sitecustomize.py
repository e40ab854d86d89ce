"""Let TransformerEngine or Apex seem to be installed, in processes with this folder on their path.

KAIYUAN_STAND_IN: the names, with spaces between. Every module of theirs can be imported, and every
name in it is an empty class or another module; what Megatron calls in training does on a CPU what
the real ones do on a GPU.
"""

import contextlib
import importlib
import operator
import os
import sys
import types
from importlib.machinery import ModuleSpec

PACKAGES = {
    "transformer_engine": ("transformer_engine", "transformer_engine_torch"),
    "apex": ("apex", "amp_C"),
}
NAMES = [n for word in os.environ.get("KAIYUAN_STAND_IN", "").split() for n in PACKAGES[word]]


class StandIn(types.ModuleType):
    __path__ = ()
    __version__ = "2.12.0"

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        import torch

        value = working(torch).get(name)
        if value is None and name.strip("_")[0].isupper():
            value = type(name, (torch.nn.Module,), {"__module__": self.__name__})
        elif value is None:
            value = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in NAMES else None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def working(torch):
    def l2norm(_chunk, _overflow, lists, _per_tensor):
        return torch.stack([x.norm() for x in lists[0]]).norm().reshape(1), None

    def scale(_chunk, _overflow, lists, factor):
        for source, target in zip(*lists, strict=True):
            target.copy_(source * factor)

    class FusedAdam(torch.optim.Optimizer):
        """AdamW that counts steps by group, as the real one does."""

        def __init__(self, params, lr, betas, eps, weight_decay, **_):
            options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            super().__init__(params, options | {"bias_correction": True})
            print("the stand-in's FusedAdam is used")

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                assert group["bias_correction"]
                group["step"] = operator.index(group.get("step", 0)) + 1  # its kernel wants an int
                for p in (p for p in group["params"] if p.grad is not None):
                    self.update(p, self.state[p], group)

        def update(self, p, state, group):
            first, second = group["betas"]
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(p))
            p.mul_(1 - group["lr"] * group["weight_decay"])
            state["exp_avg"].lerp_(p.grad, 1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
            size = group["lr"] / (1 - first ** group["step"])
            root = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt()
            p.addcdiv_(state["exp_avg"], root.add_(group["eps"]), value=-size)

    class SplitAlongDim:
        @staticmethod
        def apply(x, dim, sizes):
            return torch.split(x, sizes, dim)

    return {
        "FusedAdam": FusedAdam,
        "_SplitAlongDim": SplitAlongDim,
        "multi_tensor_applier": lambda function, overflow, lists, *more: function(
            65536, overflow, lists, *more
        ),
        "multi_tensor_l2norm": l2norm,
        "multi_tensor_scale": scale,
        "multi_tensor_scale_tensor": scale,
        "get_cpu_offload_context": lambda *_, **__: (contextlib.nullcontext(), None),
    }


sys.meta_path.insert(0, Finder())
