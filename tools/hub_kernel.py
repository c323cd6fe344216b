"""Write the layout of a Hugging Face `kernels` repository: `python tools/hub_kernel.py OUT`, or `make kernel`.

Nothing in it is compiled beforehand: Triton and NVRTC compile for the GPU that is there, so one variant serves all. The
package's modules are copied with their imports made relative, as a kernel is loaded under a name of its own.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import shutil
from pathlib import Path

import rankmoe

PACKAGE = Path(rankmoe.__file__).parent
VARIANT = "torch-universal"
#: What a layer does not need: the command line and what it runs, models, operators whose names are the process's.
_LEFT_OUT = {"__main__", "bench", "check", "checkpoint", "cli", "generate", "info", "models", "ops", "pack_checkpoint"}
_LEFT_OUT |= {"packed", "report", "shards", "tuning"}
_INTEGRATIONS = {"__init__", "transformers_forward", "transformers_state", "transformers_weights"}

_LAYERS = '''"""Layers of this kernel."""

import torch
from torch import nn

from .integrations.transformers_forward import experts_forward


class MoeExperts(nn.Module):
    """Experts of a Transformers model (``gate_up_proj``, ``down_proj``), in the module's own dtype and activation."""

    can_torch_compile = False
    has_backward = True

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] of the slots that the module holds; see ``integrations.transformers_forward``."""
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
'''


def main() -> None:
    """Write the layout and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    print(write(parser.parse_args().out))


def write(out: Path) -> Path:
    """Make OUT/build/torch-universal anew. Returns its path."""
    variant = out / "build" / VARIANT
    if variant.exists():
        shutil.rmtree(variant)
    for path in sorted(PACKAGE.rglob("*")):
        relative = path.relative_to(PACKAGE)
        if path.is_file() and _is_taken(relative):
            target = variant / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text()
            target.write_text(_with_relative_imports(text, len(relative.parts)) if path.suffix == ".py" else text)
    (variant / "layers.py").write_text(_LAYERS)
    init = variant / "__init__.py"
    init.write_text(init.read_text() + "\nfrom . import layers  # noqa: E402, F401\n")
    (variant / "metadata.json").write_text(json.dumps(_metadata(variant), indent=2) + "\n")
    return variant


def _is_taken(relative: Path) -> bool:
    top = relative.parts[0].removesuffix(".py")
    if top == "integrations":
        return relative.stem in _INTEGRATIONS and relative.suffix == ".py"
    return top not in _LEFT_OUT and relative.suffix in (".py", ".cu", ".cuh", ".json")


def _with_relative_imports(text: str, depth: int) -> str:
    """``from rankmoe.x import y`` in a file ``depth`` levels below the package's parent, as ``from .x import y``."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "rankmoe" for alias in node.names):
            raise ValueError(f"line {node.lineno}: expected 'from rankmoe... import', which can be made relative")
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "rankmoe":
            line = lines[node.lineno - 1]
            rest = node.module.removeprefix("rankmoe").removeprefix(".")
            lines[node.lineno - 1] = line.replace(f"from {node.module} import", f"from {'.' * depth}{rest} import", 1)
    return "".join(lines)


def _metadata(variant: Path) -> dict[str, object]:
    files = {
        path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(variant.rglob("*"))
        if path.is_file()
    }
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return {
        "id": f"_rankmoe_{digest[:16]}",
        "name": "rankmoe",
        "version": 1,
        "license": "Apache-2.0",
        "backend": {"type": "cpu"},
        "python-depends": [],
        "digest": {"algorithm": "sha256", "files": files},
    }


if __name__ == "__main__":
    main()
