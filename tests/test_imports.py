import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import rankmoe

PACKAGE = Path(rankmoe.__file__).parent
# types <- operations <- moe <- runner and models <- everything else (cli, bench, integrations, ...).
LAYERS = [
    {"types", "env", "files"},
    {
        *("activation", "backends", "combine", "experts", "front", "kernels", "layout", "pack", "quantize"),
        *("reference", "route", "routing_metadata", "schedule", "tuned"),
    },
    {"moe"},
    {"checkpoint", "distributed", "handoff", "models", "runner", "shards", "tuning"},
]
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}


def layer_of(module: str) -> int:
    return next((i for i, layer in enumerate(LAYERS) if module.split(".")[0] in layer), len(LAYERS))


def imported_by(module: str) -> Iterator[str]:
    """This package's modules that a module imports, in functions too; '' is the package itself."""
    tree = ast.parse(MODULES[module].read_text())
    # backends is the one place that looks implementations up when they are asked for.
    for node in tree.body if module == "backends" else ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] != "rankmoe":
                continue
            name = name.removeprefix("rankmoe").removeprefix(".")
            yield name if name in MODULES else name.rpartition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_its_own_layer_and_those_below(module):
    for imported in imported_by(module):
        assert layer_of(imported) <= layer_of(module), f"rankmoe.{module} imports rankmoe.{imported}"


def test_nothing_but_an_integration_imports_an_integration():
    users = {module for module in MODULES for name in imported_by(module) if name.startswith("integrations")}
    assert "integrations.transformers" in users
    assert {module for module in users if not module.startswith("integrations.")} == set()


def test_nothing_but_the_integrations_of_transformers_imports_it():
    users = set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "transformers" for name in names):
                users.add(module)
    assert users == {"integrations.transformers"}


def test_no_module_imports_itself_through_others():
    graph = {module: set(imported_by(module)) for module in MODULES}
    list(TopologicalSorter(graph).static_order())  # raises CycleError


def test_the_modules_of_every_layer_are_found():
    assert {"types", "quantize", "experts", "moe", "runner", "models.kimi_k3"} <= set(MODULES)


# torch is imported first: what follows is then this package's own doing.
TOUCHED = """
import json, os, sys
import numpy, safetensors.torch, torch
import torch.distributed, torch.multiprocessing

touched = {"imports": [], "variables": [], "files": [], "cuda": []}

def audit(event, arguments):
    if event == "import":
        touched["imports"].append(arguments[0])
    elif event == "open" and not str(arguments[0]).endswith((".py", ".pyc")):
        touched["files"].append(str(arguments[0]))
    elif event in ("os.mkdir", "os.rename", "os.remove", "subprocess.Popen", "socket.connect", "ctypes.dlopen"):
        touched["files"].append(f"{event} {arguments}")

read = type(os.environ).__getitem__

def recorded_read(self, name):
    touched["variables"].append(name)
    return read(self, name)

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_capability"):
    setattr(torch.cuda, name, lambda *_, name=name: touched["cuda"].append(name))
type(os.environ).__getitem__ = recorded_read
sys.addaudithook(audit)
import rankmoe
done = {key: list(values) for key, values in touched.items()}
print(json.dumps(done))
"""


@pytest.fixture(scope="module")
def touched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What ``import rankmoe`` touches in a fresh interpreter whose every place to write to is one empty folder."""
    home = tmp_path_factory.mktemp("home")
    places = dict.fromkeys(["HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"], str(home))
    environment = {**os.environ, **places, "PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TOUCHED], cwd=home, env=environment, capture_output=True, text=True, check=True
    )
    return {**json.loads(done.stdout), "left": [str(path) for path in home.rglob("*")]}


def test_importing_the_package_imports_no_compiler_and_no_command_line(touched):
    heavy = {"triton", "cuda", "typer", "rich", "matplotlib", "humming", "flashinfer", "sglang", "vllm", "transformers"}
    assert "rankmoe.types" in touched["imports"]
    assert [name for name in touched["imports"] if name.split(".")[0] in heavy] == []
    upper = ("rankmoe.cli", "rankmoe.bench", "rankmoe.integrations")
    assert [name for name in touched["imports"] if name.startswith(upper)] == []


def test_importing_the_package_touches_no_gpu(touched):
    assert touched["cuda"] == []


def test_importing_the_package_reads_no_environment_variable(touched):
    assert touched["variables"] == []


def test_importing_the_package_opens_and_leaves_no_file(touched):
    assert touched["files"] == []
    assert touched["left"] == []
