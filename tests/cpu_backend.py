"""What computes models in tests that are not about OpenVINO: torch.

To convert even a tiny model takes half a second, and the output is the same: tests/runner/test_openvino_*.py and
tests/models/test_openvino_agreement.py show that for every family.
"""

BY_TORCH = {"backend": "torch"}
"""Settings of a ``ModelConfig``."""

BY_TORCH_FLAGS = ("--backend", "torch")
