"""The servers that benchmarks compare: modules and flags. A new server is a line here."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from attrs import evolve, frozen
from cyclopts import CycloptsError

from benchmarks.model import MODEL_PATH, name_of
from benchmarks.report import console
from benchmarks.servers import Server, open_server
from trio_pool_serve.cli import read_config

OURS_MODULE = ("trio_pool_serve", "serve")

LONG_TEXTS = ("--max-model-len", "512")
"""Flags for texts of more than 256 tokens: the model can read more tokens than it is meant for."""

PATIENT = ("--max-queue-s", "60")
"""Flags for models of base size: their 512 texts at a time take longer than a request may wait by default."""


@frozen(kw_only=True)
class Variant:
    """A way to serve a model: ``python -m`` this ``module``, with the ``flags`` of our own command."""

    name: str
    module: tuple[str, ...] = OURS_MODULE
    flags: tuple[str, ...] = ()
    model: str = MODEL_PATH

    def with_flags(self, name: str, *flags: str) -> "Variant":
        """Return the same with more flags, under another name."""
        return evolve(self, name=name, flags=(*self.flags, *flags))


OURS = Variant(name="ours")


def known(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants whose flags our command has; report which are left out, and why."""
    kept = []
    for variant in variants:
        reason = refusal_of(variant.flags)
        if reason is None:
            kept.append(variant)
        else:
            say_not_measured(variant.name, reason)
    return kept


def say_not_measured(name: str, reason: str) -> None:
    """Print that something is not measured, and why."""
    console.print(f"NOT MEASURED: {name}: {reason}", style="bold red", highlight=False, markup=False, soft_wrap=True)


def refusal_of(flags: Sequence[str]) -> str | None:
    """Return why our command refuses flags; ``None`` if it accepts them."""
    try:
        read_config([MODEL_PATH, *flags])
    except (CycloptsError, ValueError) as error:
        return " ".join(str(error).split())
    return None


@asynccontextmanager
async def open_variants(variants: Sequence[Variant]) -> AsyncIterator[dict[Variant, Server]]:
    """Run all of them for as long as the block; they are ready inside."""
    async with AsyncExitStack() as stack:
        servers = {}
        for variant in variants:
            model = f"{name_of(variant.model)}={variant.model}"
            opened = open_server(variant.name, [*variant.module, model, *variant.flags], ready_path="/readyz")
            servers[variant] = await stack.enter_async_context(opened)
        yield servers
