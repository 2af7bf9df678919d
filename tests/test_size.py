"""No package grows beyond its line of ``scripts/size-limits.toml``."""

import runpy
import tomllib

import pytest

from tests.server.server_process import ROOT

pytestmark = pytest.mark.unit

SIZE = runpy.run_path(str(ROOT / "scripts" / "size"))


def test_no_package_has_more_statements_than_its_line_says():
    limits = tomllib.loads((ROOT / "scripts" / "size-limits.toml").read_text())
    areas, _ = SIZE["counted"]()
    packages = {area.removeprefix("trio_pool_serve/"): counts for area, counts in areas.items() if counts["statements"]}
    found = {
        name: packages[name]["statements"]
        for name in packages.keys() - {"the package", "benchmarks", "docs", "scripts", "tests"}
    }
    assert {name: number for name, number in found.items() if number > limits[name]["statements"]} == {}
    assert limits.keys() == found.keys()
    assert all(each["reason"] for each in limits.values())
    whole = packages["the package"]
    assert whole["docstring lines"] >= 0.12 * whole["lines"]
