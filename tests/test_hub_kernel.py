"""The Hugging Face `kernels` layout: what is written, and that the real library loads a layer from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

kernels = pytest.importorskip("kernels", reason="needs the kernels library")
sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

import hub_kernel  # noqa: E402

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 6, 48, 32


@kernels.use_kernel_forward_from_hub("RankmoeTestExperts")
class PlainExperts(nn.Module):
    """Experts as Transformers lays them out, computed token by token."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / 7)
        self.down_proj = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / 6)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for token, ids in enumerate(top_k_index.tolist()):
            for slot, expert in enumerate(ids):
                if 0 <= expert < NUM_EXPERTS:
                    middle = self._apply_gate(self.gate_up_proj[expert] @ hidden_states[token])
                    out[token] += top_k_weights[token, slot] * (self.down_proj[expert] @ middle)
        return out


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("kernel")
    hub_kernel.write(out)
    return out


def test_the_files_are_those_of_the_digest_and_import_nothing_of_an_installed_package(repository):
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    variant = repository / "build" / "torch-universal"
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert (str(metadata.name.python_name), metadata.version, metadata.license) == ("rankmoe", 1, "Apache-2.0")
    for path in variant.rglob("*.py"):
        lines = path.read_text().splitlines()
        assert not [line for line in lines if line.strip().startswith(("from rankmoe", "import rankmoe"))], path
    assert json.loads((variant / "metadata.json").read_text())["id"].isidentifier()


def test_the_layer_replaces_a_models_own_and_computes_the_same(repository):
    model = nn.Sequential(PlainExperts())
    layer = kernels.LocalLayerRepository(repository, layer_name="MoeExperts")
    inputs = (
        torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(1)),
        torch.tensor([[0, 5], [NUM_EXPERTS, 2], [-1, 1]] * 3),
        torch.rand(9, 2, generator=torch.Generator().manual_seed(2)),
    )
    expected = model[0](*inputs)
    with kernels.use_kernel_mapping({"RankmoeTestExperts": {"cpu": layer}}):
        replaced = kernels.kernelize(model, device="cpu", mode=kernels.Mode.INFERENCE)[0]
    module = sys.modules[replaced.forward.__func__.__module__]
    assert module.__name__.startswith("_rankmoe_")
    assert Path(module.__file__).is_relative_to(repository)
    got = replaced(*inputs)
    assert (got - expected).norm() / expected.norm() < 1e-6


def test_it_loads_where_the_package_is_not_installed(repository):
    """Every module of it, in an interpreter that has torch and no rankmoe."""
    script = """
import importlib, importlib.util, pathlib, sys
sys.modules["rankmoe"] = None
root = pathlib.Path(sys.argv[1])
spec = importlib.util.spec_from_file_location("kernel", root / "__init__.py")
package = sys.modules["kernel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
for path in sorted(root.rglob("*.py")):
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    if not name.endswith(("_triton", "experts_humming", "__init__")):
        importlib.import_module(f"kernel.{name}")
assert not [name for name in sys.modules if name.startswith("rankmoe.")]
"""
    variant = repository / "build" / "torch-universal"
    result = subprocess.run([sys.executable, "-c", script, str(variant)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_an_import_that_cannot_be_made_relative_is_refused():
    assert hub_kernel._with_relative_imports("from rankmoe import env\n", 2) == "from .. import env\n"
    assert hub_kernel._with_relative_imports("from rankmoe.a.b import c, d\n", 1) == "from .a.b import c, d\n"
    with pytest.raises(ValueError, match="line 2: expected 'from rankmoe"):
        hub_kernel._with_relative_imports("import os\nimport rankmoe.env\n", 1)
