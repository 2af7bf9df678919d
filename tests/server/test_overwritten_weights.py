"""A real server whose model's file is overwritten while it serves it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.model_families import edit_weights, write_family
from tests.server.server_process import LAUNCHER, launched


def overwrite(file: Path, edit: Callable[[bytes], bytes]) -> None:
    """Write to the file itself, as `cp` does; an empty one is cut short first."""
    content = edit(file.read_bytes())
    with file.open("r+b") as same:
        same.truncate(len(content))
        same.write(content)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--replicas", "1"), ("--engine", "process", "--replicas", "2")], ids=" ".join)
async def test_a_model_whose_file_is_overwritten_or_cut_short_computes_the_same(flags: tuple[str, ...], tmp_path: Path):
    """Until it is loaded again, it returns the vectors that belong to its fingerprint."""
    file = write_family(tmp_path / "bert", "bert") / "model.safetensors"
    other = write_family(tmp_path / "other", "bert") / "model.safetensors"
    edit_weights(other, lambda weights: weights.update({name: weight + 1 for name, weight in weights.items()}))
    assert other.stat().st_size == file.stat().st_size
    content = file.read_bytes()
    async with launched(tmp_path, file.parent, "--dtype", "float32", *flags, command=LAUNCHER[:-2]) as server:

        async def answers() -> set[tuple[int, str, str]]:
            given = [await server.ask(*range(5, 5 + tokens)) for tokens in (1, 20, 1)]
            return {(each.status_code, each.headers["model-fingerprint"], str(each.json()["data"])) for each in given}

        first = await answers()
        for edit in (lambda _: other.read_bytes(), lambda _: b"", lambda _: content[:5000]):
            overwrite(file, edit)
            assert await answers() == first
        assert {status for status, _, _ in first} == {200}
