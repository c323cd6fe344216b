import os

import torch
from hypothesis import settings

# Without a GPU Triton's kernels run in its interpreter. It decides when it is first imported, which any test may cause.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Fixed examples: a run fails for a change of the code, never for a new roll of the dice.
settings.register_profile("rankmoe", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("rankmoe")
