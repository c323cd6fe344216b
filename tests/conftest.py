import os
from pathlib import Path

import cuda_on_cpu
import pytest
import torch
from hypothesis import settings

from rankmoe.kernels import nvrtc

# Without a GPU Triton's kernels run in its interpreter. It decides when it is first imported, which any test may cause.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Fixed examples: a run fails for a change of the code, never for a new roll of the dice.
settings.register_profile("rankmoe", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("rankmoe")


@pytest.fixture(scope="session")
def emulation_directory(tmp_path_factory) -> Path:
    """Where the kernels compiled for a CPU lie, one folder for all processes of a run."""
    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda_on_cpu"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request, monkeypatch) -> str:
    """Where the native kernels run: on a GPU, and on the CPU by ``cuda_on_cpu``, which shows anything but speed."""
    if request.param == "cuda":
        if not nvrtc.can_launch():
            pytest.skip("needs a Hopper or Blackwell GPU, NVRTC, cuda-bindings")
    elif not cuda_on_cpu.can_run():
        pytest.skip("needs g++")
    else:
        cuda_on_cpu.launch_on_cpu(monkeypatch, request.getfixturevalue("emulation_directory"))
    return request.param
