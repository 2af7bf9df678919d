"""A model of capacity: how many requests/s engines, API processes and links can do, from what each of them costs."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from benchmarks.report import RESULTS
from benchmarks.simulated_scenario import Costs, Device, Scenario

AIMED_SHARE = 0.8
"""Of its time, what an API process may be busy for at all that the engines can compute."""

CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 2048, 16384
"""As ``--max-batch-tokens auto``."""

ASSUMED_GPU = Device(
    name="GPU (assumed)",
    fixed_s=0.005,
    seconds_per_token=1 / 40_000,
    max_batch_tokens=GPU_BATCH_TOKENS,
    pads=False,
    in_flight=2,
)
"""Not measured."""


@frozen(kw_only=True)
class Measured:
    """What was measured: an engine of one core, an API process, and an engine's end of a link."""

    device: Device
    costs: Costs
    link_engine_s: float
    """Processor time of an engine's event loop for each second of an idle link."""

    @classmethod
    def read(cls, folder: Path = RESULTS) -> "Measured":
        """Return the constants that ``benchmarks.scaling_constants`` has written: medians of its rounds."""
        return cls._of(_document(folder)["constants"])

    @classmethod
    def read_costliest(cls, folder: Path = RESULTS) -> "Measured":
        """Return what it might be instead: each cost as in the round in which it was highest.

        Of a batch it is what the line through all batches says, divided by the share of it that the line says for the
        batch that it underrates most: batches differ from the line by more than one round from another.
        """
        document = _document(folder)
        constants, rounds = document["constants"], document["rounds"]
        most = {name: max(each[name] for each in rounds) for name in constants}
        batches = {name: constants[name] / (1 - constants["fit_error"]) for name in ("fixed_s", "seconds_per_token")}
        return cls._of(most | batches)

    @classmethod
    def _of(cls, found: Mapping[str, float]) -> "Measured":
        device = Device(
            name="one core, MiniLM",
            fixed_s=found["fixed_s"],
            seconds_per_token=found["seconds_per_token"],
            max_batch_tokens=CPU_BATCH_TOKENS,
        )
        costs = Costs(request_s=found["request_s"], row_s=found["row_s"], link_s=found["link_api_s"])
        return cls(device=device, costs=costs, link_engine_s=found["link_engine_s"])


def _document(folder: Path) -> Any:
    return json.loads((folder / "scaling_constants.json").read_text())


@frozen(kw_only=True)
class Capacity:
    """Requests/s: the least of what engines and API processes can do is what all can."""

    engines_per_s: float
    api_per_s: float

    @property
    def requests_per_s(self) -> float:
        """What all can do together."""
        return min(self.engines_per_s, self.api_per_s)


def predict(scenario: Scenario) -> Capacity:
    """Return what a cluster can do, if batches are full and have no padding."""
    api_s = scenario.seconds_of(scenario.traffic.rows_per_request)
    return Capacity(engines_per_s=scenario.capacity_per_s, api_per_s=scenario.api_processes / api_s)


def with_enough_processes(scenario: Scenario) -> Scenario:
    """Return the scenario with as many API processes as its engines need."""
    of_one = predict(attrs.evolve(scenario, api_processes=1)).api_per_s
    return attrs.evolve(scenario, api_processes=math.ceil(scenario.capacity_per_s / of_one / AIMED_SHARE))
