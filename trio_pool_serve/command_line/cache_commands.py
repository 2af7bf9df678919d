"""``trio-pool-serve cache``: shows and removes converted models."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from trio_pool_serve.errors import require

if TYPE_CHECKING:
    from trio_pool_serve.storage.model_cache import EntrySummary, ModelCache

cache_app = App(name="cache", help="List or remove the converted models in `--cache-dir`.")

CacheDir = Annotated[
    str | None,
    Parameter(
        env_var="TRIO_POOL_SERVE_CACHE_DIR",
        help="Directory of the cache, as for `serve`; by default `$XDG_CACHE_HOME/trio_pool_serve`, or "
        "`~/.cache/trio_pool_serve`.",
    ),
]

COLUMNS = ("name", "what", "size", "last used", "made with")


@cache_app.command(name="list")
def list_entries(*, cache_dir: CacheDir = None) -> int:
    """List the converted models, last used first: in columns on a terminal, otherwise separated by tabs."""
    cache = _cache_of(cache_dir)
    entries = cache.entries()
    _print_rows([_cells_of(entry) for entry in entries])
    total = _size(sum(entry.size_bytes for entry in entries))
    sys.stdout.flush()
    sys.stderr.write(f"{len(entries)} entries in {cache.folder}, {total} in total\n")
    return 0


@cache_app.command
def remove(
    *names: Annotated[str, Parameter(help="Names, as listed by `cache list`.")],
    all: Annotated[bool, Parameter(help="Remove all models.", negative=())] = False,  # noqa: A002  (the name of a flag)
    cache_dir: CacheDir = None,
) -> int:
    """Remove converted models. Servers that have loaded them keep running; their next start converts again.

    If a process is converting or reading a model, the model is not removed, and the exit status is 1.
    """
    cache = _cache_of(cache_dir)
    known = {entry.name: entry for entry in cache.entries()}
    listed = ", ".join(known) or "none"
    if bool(names) == all:
        raise ValueError(f"Name the models to remove from {cache.folder}, or use --all. It contains: {listed}.")
    unknown = [name for name in names if name not in known]
    require(not unknown, f"{cache.folder} does not contain {', '.join(unknown)}. It contains: {listed}.", ValueError)
    kept = 0
    for name in known if all else dict.fromkeys(names):
        if cache.remove(known[name]):
            sys.stdout.write(f"removed {name}, {_size(known[name].size_bytes)}\n")
        else:
            kept += 1
            sys.stderr.write(f"{name} was not removed: a process is converting or reading it\n")
    return 1 if kept else 0


def _cache_of(cache_dir: str | None) -> "ModelCache":
    from trio_pool_serve.storage.model_cache import ModelCache

    cache = ModelCache.of(cache_dir)
    if cache is None:
        raise ValueError("--cache-dir is empty: name the directory of the cache.")
    return cache


def _cells_of(entry: "EntrySummary") -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used_at))
    if entry.about is None:
        return entry.name, "from another version, not used", _size(entry.size_bytes), used, ""
    versions = ", ".join(f"{library} {version}" for library, version in entry.about.versions.items())
    return entry.name, entry.about.what, _size(entry.size_bytes), used, versions


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    if not sys.stdout.isatty():
        sys.stdout.writelines("\t".join(row) + "\n" for row in rows)
        return
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*[Column(name, overflow="fold", no_wrap=name == "name") for name in COLUMNS], box=None)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)
