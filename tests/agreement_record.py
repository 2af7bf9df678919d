"""A record of what passing tests have shown: which clients work, and how near the oracles the answers are.

``scripts/test --write-agreement -m ""`` writes it to docs/agreement.json: most families are slow tests. A run without
that option writes nothing; of a part or a kind of model that a run reports nothing of, the earlier record stays.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import Factory, define

PATH = Path(__file__).parents[1] / "docs" / "agreement.json"
CLIENT, AGREEMENT, DEFAULT_FLAGS = "client", "agreement", "default_flags"


@define(eq=False)
class Record:
    """What a run's passing tests have reported, without repetitions."""

    clients: set[tuple[str, str, str]] = Factory(set)
    """Dialect, route, client."""
    agreements: dict[tuple[str, str, str], float] = Factory(dict)
    """The largest difference by family, task and oracle."""
    default_flags: list[dict[str, object]] = Factory(list)
    """By kind of model: what computes it, in which dtype, and how near it is to float32."""

    def add(self, kind: object, row: tuple) -> None:
        if kind == CLIENT:
            self.clients.add(row)
        elif kind == AGREEMENT:
            *key, difference = row
            self.agreements[tuple(key)] = max(difference, self.agreements.get(tuple(key), 0.0))
        elif kind == DEFAULT_FLAGS:
            self.default_flags.append(dict(zip(("kind", "dtype", "by", "error", "cosine"), row, strict=True)))

    def document(self) -> dict[str, list[dict[str, object]]]:
        return {
            "default_flags": self.default_flags,
            "clients": [dict(zip(("dialect", "route", "client"), row, strict=True)) for row in sorted(self.clients)],
            "agreement": [
                {"family": family, "task": task, "oracle": oracle, "largest_difference": float(f"{difference:.2g}")}
                for (family, task, oracle), difference in sorted(self.agreements.items())
            ],
        }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            for kind, row in report.user_properties:
                self.add(kind, row)

    def pytest_sessionfinish(self) -> None:
        reported = {part: rows for part, rows in self.document().items() if rows}
        earlier = json.loads(PATH.read_text()) if PATH.exists() else {}
        kinds = {row["kind"]: row for row in (*earlier.get(DEFAULT_FLAGS, ()), *self.default_flags)}
        reported[DEFAULT_FLAGS] = [kinds[kind] for kind in sorted(kinds)]
        PATH.write_text(json.dumps({**earlier, **reported}, indent=2) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-agreement", action="store_true", help="write docs/agreement.json from this run's tests")
    parser.addoption(
        "--write-compared", action="store_true", help="write docs/compared-with-*.json from tests/compatibility/"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Of several processes, the one that starts the others hears of all tests.
    if config.getoption("--write-agreement") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record(), "agreement-record")


@pytest.fixture
def record_client(request: pytest.FixtureRequest) -> Callable[[str, str, str], None]:
    """Say that this test asks a dialect's route through a client; it counts if the test passes."""

    def record(dialect: str, route: str, client: str) -> None:
        request.node.user_properties.append((CLIENT, (dialect, route, client)))

    return record


@pytest.fixture
def record_agreement(request: pytest.FixtureRequest) -> Callable[[str, str, str, float], None]:
    """Say how far a family's results of a task are from an oracle's; it counts if the test passes."""

    def record(family: str, task: str, oracle: str, difference: float) -> None:
        request.node.user_properties.append((AGREEMENT, (family, task, oracle, float(difference))))

    return record


@pytest.fixture
def record_default_flags(request: pytest.FixtureRequest) -> Callable[[str, str, str, float, float], None]:
    """Say what computes a kind of model by default, and how near float32; it counts if the test passes."""

    def record(kind: str, dtype: str, by: str, error: float, cosine: float) -> None:
        row = kind, dtype, by, float(f"{error:.2g}"), round(cosine, 5)
        request.node.user_properties.append((DEFAULT_FLAGS, row))

    return record
