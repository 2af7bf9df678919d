"""Tables of cases that one test goes through, with the fixtures that it has started once."""

import inspect
from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from itertools import zip_longest
from typing import Any

import pytest

Test = Callable[..., Awaitable[None]]


def each(names: str | tuple[str, ...], cases: Iterable[Any], ids: Iterable[str] = ()) -> Callable[[Test], Test]:
    """Run a test once for each case, as ``pytest.mark.parametrize`` does, but with the same server for all.

    A case that fails is reported by itself, under its id, and the others are gone through all the same.
    """
    cases = list(zip_longest(cases, ids))
    assert cases, "an empty table shows nothing"
    names = (names,) if isinstance(names, str) else names

    def go_through(test: Test) -> Test:
        parameters = inspect.signature(test).parameters
        table_in_table = "subtests" in parameters

        @wraps(test)
        async def all_cases(*, subtests: pytest.Subtests, **fixtures: Any) -> None:
            if table_in_table:
                fixtures["subtests"] = subtests
            for case, name in cases:
                given = dict(zip(names, case if len(names) > 1 else (case,), strict=True))
                with subtests.test(name, **({} if name else given)):
                    await test(**fixtures, **given)

        own = inspect.signature(all_cases, follow_wrapped=False).parameters["subtests"]
        fixtures = [parameter for name, parameter in parameters.items() if name not in (*names, "subtests")]
        all_cases.__signature__ = inspect.Signature([*fixtures, own])  # by which pytest finds fixtures
        return all_cases

    return go_through
