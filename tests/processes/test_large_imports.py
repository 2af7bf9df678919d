"""Processes without torch."""

import subprocess
import sys

PROGRAM = """
from trio_pool_serve.processes.large_imports import allow_torch, forbid_torch

forbid_torch()
try:
    import torch
except ImportError:
    allow_torch()
    import torch

    print(torch.ones(2).sum().item())
"""


def test_torch_can_be_imported_again_once_it_is_allowed():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["2.0"]
