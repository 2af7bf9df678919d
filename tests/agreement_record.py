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
CLIENT, AGREEMENT, DEFAULT_FLAGS, ARCHITECTURES = "client", "agreement", "default_flags", "architectures"


@define(eq=False)
class Record:
    """What a run's passing tests have reported, without repetitions."""

    clients: set[tuple[str, str, str]] = Factory(set)
    """Dialect, route, client."""
    agreements: dict[tuple[str, str, str], float] = Factory(dict)
    """The largest difference by family, task and oracle."""
    default_flags: list[dict[str, object]] = Factory(list)
    """By kind of model: what computes it, in which dtype, and how near it is to float32."""

    architectures: dict[str, dict[str, object]] = Factory(dict)
    """By model type: what comes of it by default, and in float32."""

    def add(self, kind: object, row: tuple) -> None:
        if kind == CLIENT:
            self.clients.add(row)
        elif kind == AGREEMENT:
            *key, difference = row
            self.agreements[tuple(key)] = max(difference, self.agreements.get(tuple(key), 0.0))
        elif kind == DEFAULT_FLAGS:
            flags = dict(zip(("kind", "dtype", "by", "error", "cosine"), row, strict=True))
            self.default_flags.append(flags | {"error": float(f"{row[3]:.2g}"), "cosine": round(row[4], 5)})

        elif kind == ARCHITECTURES:
            self.architectures[row[0]] = dict(zip(("name", "by_default", "in_float32"), row, strict=True))

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
        architectures = {row["name"]: row for row in earlier.get(ARCHITECTURES, ())} | self.architectures
        reported[ARCHITECTURES] = [architectures[name] for name in sorted(architectures)]
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


def _recorder(kind: str) -> Callable[..., Callable[..., None]]:
    """Return a fixture: a function that a test calls with a row, which counts if the test passes."""

    @pytest.fixture
    def recorder(request: pytest.FixtureRequest) -> Callable[..., None]:
        def record(*row: object) -> None:
            # Not NumPy's numbers, which cannot be sent from the processes that run tests.
            plain = [each if isinstance(each, str) else float(each) for each in row]
            request.node.user_properties.append((kind, tuple(plain)))

        return record

    return recorder


record_client = _recorder(CLIENT)
"""The test asks a route through a client: dialect, route, client."""

record_agreement = _recorder(AGREEMENT)
"""How far a family's results of a task are from an oracle's: family, task, oracle, difference."""

record_default_flags = _recorder(DEFAULT_FLAGS)
"""What computes a kind of model by default, and how near float32: kind, dtype, by what, error, cosine."""

record_architecture = _recorder(ARCHITECTURES)
"""Whether a model type of transformers agrees or is refused: model type, by default, in float32."""
