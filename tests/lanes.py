"""Tables of which the default lane runs a sample, and ``scripts/test all`` every case."""

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
