"""`rankmoe` with a GPU made believe and candidates timed by a made-up clock; run under torchrun by test_cli.py."""

import torch

from rankmoe.bench import profile
from rankmoe.cli import main
from rankmoe.env import local_rank
from rankmoe.kernels import experts_common, experts_cuda
from rankmoe.tuning import candidates_of, default_of


class Clock:
    """On rank 0 the second candidate is fast; on rank 1 it is slow, and the third is as fast as on rank 0."""

    def __init__(self, preset, placement, popularity=None) -> None:
        assert placement.ep_rank == local_rank() == torch.cuda.current_device()

    def prepare(self, key, configs) -> None:
        pass

    def check(self, key, config) -> None:
        pass

    def time(self, key, config) -> float:
        second, third = candidates_of(key)[1:3]
        times = {default_of(key): 100.0, second: 10.0 if local_rank() == 0 else 90.0, third: 50.0}
        return times.get(config, 200.0)


current = 0


def set_device(device: int) -> None:
    global current
    current = device


torch.cuda.device_count = lambda: 2
torch.cuda.set_device = set_device
torch.cuda.current_device = lambda: current
experts_cuda.available = lambda: True
experts_common.architecture = lambda device: "sm_90"
experts_common.device_name = lambda device: "NVIDIA Pretended"
profile.GpuProfiler = Clock
main()
