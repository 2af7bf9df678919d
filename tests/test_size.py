"""What ``scripts/size`` counts."""

import runpy
import tomllib
from textwrap import dedent

import pytest

from tests.server.server_process import ROOT

pytestmark = pytest.mark.unit

OUTSIDE = {"the package", "benchmarks", "docs", "scripts", "tests"}

SIZE = runpy.run_path(str(ROOT / "scripts" / "size"))

SOURCE = dedent(
    '''\
    """A module.

    Of two paragraphs.
    """

    LIMIT = 3
    """Why three."""


    class Queue:
        """Has rows."""

        def take(self, count):
            """Take some."""
            if count > LIMIT:
                count = LIMIT

            async def wait():
                return count

            return wait
    '''
)


def test_strings_that_are_statements_are_documentation_and_no_statements():
    assert SIZE["counts_of"](SOURCE, is_python=True) == {
        "files": 1,
        "lines": 21,
        "docstring lines": 4 + 1 + 1 + 1,
        "statements": 8,  # LIMIT, class, take, if, count, wait, two returns
    }
    assert SIZE["counts_of"]("# A page\n\ntext\n", is_python=False) == {"files": 1, "lines": 3}


def test_a_function_has_the_statements_inside_it():
    assert sorted(SIZE["functions_of"](SOURCE)) == [(1, 2, 18, "wait"), (5, 9, 13, "take")]


@pytest.mark.parametrize(
    ("name", "area"),
    [
        ("trio_pool_serve/cli.py", "trio_pool_serve"),
        ("trio_pool_serve/engine/remote/link.py", "trio_pool_serve/engine"),
        ("trio_pool_serve/console/console.js", "trio_pool_serve/console"),
        ("trio_pool_serve/py.typed", None),
        ("benchmarks/results/README.md", None),
        ("docs/structure.md", "docs"),
        ("scripts/test", "scripts"),
        ("README.md", None),
    ],
)
def test_each_file_counts_for_one_area_or_for_none(name: str, area: str | None):
    assert SIZE["area_of"](name) == area


def test_no_package_has_more_statements_than_its_line_says():
    limits = tomllib.loads((ROOT / "scripts" / "size-limits.toml").read_text())
    areas, _ = SIZE["counted"]()
    packages = {area.removeprefix("trio_pool_serve/"): counts for area, counts in areas.items() if counts["statements"]}
    found = {name: packages[name]["statements"] for name in packages.keys() - OUTSIDE}
    assert {name: number for name, number in found.items() if number > limits[name]["statements"]} == {}
    assert limits.keys() == found.keys()
    assert all(each["reason"] for each in limits.values())
    whole = packages["the package"]
    assert whole["docstring lines"] >= 0.12 * whole["lines"]
