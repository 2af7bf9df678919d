"""Which tests are left out: cases of long tables by the default lane, and by every lane slow ones if time is short."""

import os
import time
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sampled(
    names: str | tuple[str, ...], cases: Iterable[Any], keep: Collection[Any], **options: Any
) -> pytest.MarkDecorator:
    """As ``pytest.mark.parametrize``, but cases that are not in ``keep`` are slow."""
    assert not isinstance(cases, set | frozenset), "a set has another order in each process"
    cases = [*cases]
    assert all(case in cases for case in keep), "a case that is kept is none of the table"

    def param(case: Any) -> Any:
        if case in keep:
            return case
        values = (case,) if isinstance(names, str) else case
        return pytest.param(*values, marks=pytest.mark.slow)

    return pytest.mark.parametrize(names, [param(case) for case in cases], **options)


@pytest.hookimpl(tryfirst=True)  # before the test's fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no slow test after the given time, so that a run that may last so long only ends with what it has found."""
    limit_s = float(os.environ.get("NO_SLOW_TESTS_AFTER", "inf"))
    if time.time() > limit_s and item.get_closest_marker("slow"):
        pytest.skip("no time is left for slow tests")
