"""The stand-in for CUDA; in processes of their own, because it changes torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator

from .conftest import ROOT


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_asks_for_cuda_gets_the_cpu():
    said = run(
        "import torch, kaiyuan.megatron\n"
        "x = torch.ones(2, 3, device='cuda')\n"
        "y = torch.zeros(2, 3).cuda() + torch.arange(3).to('cuda:0')\n"
        "z = torch.empty(1, device=torch.cuda.current_device())\n"
        "w = torch.nn.Linear(1, 1).cuda().weight\n"
        "print(*{t.device.type for t in (w, x, y, z)}, x.type())\n"
    )
    assert said == "cpu torch.cuda.FloatTensor"


def test_the_random_state_of_the_gpu_is_the_cpus():
    said = run(
        "import torch, kaiyuan.megatron\n"
        "import megatron.core.tensor_parallel.random as random\n"
        "state = random._get_cuda_rng_state()\n"
        "a = torch.rand(3)\n"
        "random._set_cuda_rng_state(state)\n"
        "print(torch.equal(a, torch.rand(3)))"
    )
    assert said == "True"


def test_another_version_of_megatron_is_refused():
    said = run(
        "import importlib.metadata as metadata\n"
        "real = metadata.version\n"
        "metadata.version = lambda name: '0.20.0' if name == 'megatron-core' else real(name)\n"
        "from kaiyuan.errors import UserError\n"
        "import torch\n"
        "try: import kaiyuan.megatron\n"
        "except UserError as error: print(error, torch.cuda.is_available())"
    )
    assert said.startswith("megatron-core 0.20.0 cannot run without CUDA here, only 0.19.2")
    assert said.endswith("False")


def test_with_cuda_nothing_is_touched():
    # A machine with CUDA, as far as is_available tells.
    said = run(
        "import torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}\n"
        "modules = torch.nn.Module.cuda, torch.accelerator.current_device_index\n"
        "from kaiyuan.megatron import cpu\n"
        "after = {name: getattr(torch.cuda, name) for name in before}\n"
        "assert modules == (torch.nn.Module.cuda, torch.accelerator.current_device_index)\n"
        "print(before == after, cpu.is_active())"
    )
    assert said == "True False"


def test_no_module_asks_cuda_when_it_is_loaded():
    """Outside of functions, whose bodies wait until they are called, nothing reads torch.cuda."""

    def loaded(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                # Defaults and decorators are computed when the module is loaded.
                for part in (*child.args.defaults, *child.args.kw_defaults, *child.decorator_list):
                    yield from ast.walk(part) if part else ()
            elif not isinstance(child, ast.Lambda):
                yield child
                yield from loaded(child)

    files = list((ROOT / "kaiyuan").rglob("*.py"))
    assert len(files) > 50
    for file in files:
        for node in loaded(ast.parse(file.read_text())):
            asks = isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda")
            assert not asks, f"{file}:{node.lineno}"


def test_every_name_exists_in_torch():
    """An entry for a name that torch.cuda does not have would stand in for nothing."""
    said = run(
        "import torch\n"
        "names = set(dir(torch.cuda))\n"
        "from kaiyuan.megatron import cpu\n"
        "print(sorted(set(cpu._CUDA_NAMES) - names))"
    )
    assert said == "[]"
