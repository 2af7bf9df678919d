"""What is loaded, and how it is computed: for the log, and for ``trio-pool-serve check``."""

from typing import Literal, TypeAlias

from attrs import frozen

Backend: TypeAlias = Literal["torch", "openvino", "numpy"]


@frozen(kw_only=True)
class RunnerDescription:
    """One model that is loaded; as text, a line for the log."""

    model_type: str
    parameters: int
    weight_bytes: int
    """Bytes of all parameters, as torch has loaded them."""
    dtype: str
    requested_dtype: str
    device: str
    heads: str
    dimensions: int
    max_tokens: int
    backend: Backend
    computation: tuple[str, ...]
    """How batches are computed and why so, in words."""
    fingerprint: str
    why_float32: str = ""
    """Why it is loaded in float32 where ``auto`` would be another dtype; empty if it is not."""

    def __str__(self) -> str:
        reason = "native bfloat16" if self.dtype == "bfloat16" else self.why_float32 or "no native bfloat16"
        chosen = f" (auto: {reason})" if self.requested_dtype == "auto" else ""
        dimensions = f", {self.dimensions} dimensions" if self.dimensions else ""
        return (
            f"{self.model_type}, {self.parameters / 1e6:.1f} M parameters, {self.dtype} on {self.device}{chosen}, "
            f"{self.heads}{dimensions}, {self.max_tokens} tokens{''.join(f', {what}' for what in self.computation)}"
        )
