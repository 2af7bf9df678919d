"""Model folders that many tests want are built once in a session, by whichever process wants one first, and copied."""

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

_root: list[Path] = []
"""Where they are kept, while a session lasts."""


@contextmanager
def keeping_in(root: Path) -> Iterator[None]:
    """Keep the folders that are built in the block below ``root``."""
    root.mkdir(exist_ok=True)
    _root.append(root)
    yield
    _root.clear()


@pytest.fixture(scope="session", autouse=True)
def _kept_folders(tmp_path_factory: pytest.TempPathFactory, worker_id: str):
    own = tmp_path_factory.getbasetemp()
    with keeping_in((own if worker_id == "master" else own.parent) / "kept_folders"):
        yield


def built_once(build: Callable[..., Path]) -> Callable[..., Path]:
    """Have a function that writes a folder, and returns it, do so once for all its other arguments.

    Each caller gets a copy, which it may change.
    """

    @wraps(build)
    def copied(folder: Path, *args: Any, **settings: Any) -> Path:
        what = repr((build.__module__, build.__qualname__, args, sorted(settings.items())))
        assert " at 0x" not in what, f"{what} is not the same in another process"
        kept = _root[0] / hashlib.sha256(what.encode()).hexdigest()
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                begun = kept.with_suffix(".begun")
                shutil.rmtree(begun, ignore_errors=True)
                assert build(begun, *args, **settings) == begun
                begun.rename(kept)
        return shutil.copytree(kept, folder, dirs_exist_ok=True)

    return copied


def by_name(*builders: Callable[..., Path]) -> dict[str, Callable[..., Path]]:
    return {build.__name__: build for build in builders}


def each_built_once(**builders: Callable[[Path], Path]) -> dict[str, Callable[..., Path]]:
    """Return functions that write a folder, by their names, as ``built_once``."""
    for name, build in builders.items():
        build.__name__ = build.__qualname__ = name
    return {name: built_once(build) for name, build in builders.items()}
