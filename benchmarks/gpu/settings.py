"""What ``python -m benchmarks.gpu`` is told."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from attrs import field, frozen
from attrs.validators import gt
from cyclopts import Parameter

from benchmarks.bert_shapes import Shape
from benchmarks.report import RESULTS

PartName: TypeAlias = Literal[
    "tests", "ordering", "memory", "overlap", "load",
    "compiling", "engines-1", "engines-8", "engines-4", "engines-2", "attention", "bge-m3", "qwen3-0.6b",
]  # fmt: skip
"""The second line are parts of ``--quick``, as ``tests`` is."""

TRIAL_FACTOR = 5
"""How much longer everything may take on CPU, which computes slowly and perhaps beside others."""


def share_of_cores(divisor: int, *, most: int) -> int:
    """Return a number of processes by the number of cores: at least one, and at most ``most``."""
    return max(1, min(most, len(os.sched_getaffinity(0)) // divisor))


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``rounds`` of ``seconds`` for each load; all parts, or ``only`` those.

    ``flags`` are those of the server, and replace the benchmark's own. ``load_processes`` are those that send requests;
    by default one for four cores, and at most eight. ``device cpu`` tries everything out, and needs an ``output_dir``;
    ``shape tiny`` also has fewer clients.

    ``quick`` runs other parts, with loads of two seconds. It compares with ``against``, the folder of another checkout,
    if there is one.
    """

    rounds: int = field(default=3, validator=gt(0))
    seconds: float = field(default=4.0, validator=gt(0))
    quick: Annotated[bool, Parameter(negative=())] = False
    against: Path | None = None
    shape: Shape = "base"
    device: str = "cuda"
    flags: str = ""
    load_processes: int = field(default=share_of_cores(4, most=8), validator=gt(0))
    only: Annotated[tuple[PartName, ...], Parameter(consume_multiple=True, negative=())] = ()
    output_dir: Path | None = None

    def __attrs_post_init__(self) -> None:
        if self.on_cpu and self.output_dir is None:
            raise ValueError("--device cpu is a trial, whose results need an --output-dir")
        if self.against is not None and not (self.quick and (self.against / "trio_pool_serve").is_dir()):
            raise ValueError("--against is the folder of another checkout, for --quick")

    @property
    def on_cpu(self) -> bool:
        """Whether this is a trial on a machine without a GPU."""
        return self.device == "cpu"

    @property
    def time_factor(self) -> float:
        """How much longer everything may take than on a GPU."""
        return TRIAL_FACTOR if self.on_cpu else 1

    @property
    def folder(self) -> Path:
        """Where results go."""
        return (self.output_dir or RESULTS).resolve()

    @property
    def own_flags(self) -> list[str]:
        """The flags given, and those that say which device computes and with what."""
        given = shlex.split(self.flags)
        return without_given({"--device": self.device, **({"--backend": "torch"} if self.on_cpu else {})}, given)

    def server_flags(self) -> list[str]:
        """Return the server's flags: with them, no limit of its own is in the way of 1024 clients."""
        limits = {
            "--engine": "process",
            "--api-workers": str(share_of_cores(2, most=16)),
            "--max-queue-s": "600",
            "--request-timeout-s": "600",
            "--memory-budget-bytes": str(16 * 2**30),
        }
        return without_given(limits, self.own_flags)


def without_given(flags: dict[str, str], given: list[str]) -> list[str]:
    """Return ``given`` behind those of ``flags`` that it does not have."""
    names = {flag.partition("=")[0] for flag in given}
    return [*(word for name, value in flags.items() if name not in names for word in (name, value)), *given]
