"""What a simulated cluster is made of, what is sent to it, and what came of it."""

import math
from statistics import NormalDist

from attrs import field, frozen

from trio_pool_serve.engine.remote.connectors import HostConnector
from trio_pool_serve.engine.remote.routing import COMPARED
from trio_pool_serve.engine.remote.silence import HEARTBEATS_IN_TIMEOUT

LINK_TIMEOUT_S = 1.5
"""As ``HostConnector`` has it by default."""

QUANTILES = 999
"""Lengths of rows that are told apart, each as likely as the others."""


@frozen(kw_only=True)
class Device:
    """How long batches take: ``fixed_s``, and so much for each token, of padding too if it ``pads``."""

    name: str
    fixed_s: float
    seconds_per_token: float
    max_batch_tokens: int
    pads: bool = True
    in_flight: int = 1
    """Batches that are launched and not done; the device computes one after the other."""

    @property
    def tokens_per_s(self) -> float:
        """Of full batches without padding."""
        return self.max_batch_tokens / (self.fixed_s + self.max_batch_tokens * self.seconds_per_token)


@frozen(kw_only=True)
class Costs:
    """Processor time of an API process's event loop, seconds: for a request, for each further row, for a link."""

    request_s: float
    row_s: float
    link_s: float
    """For each second of an idle link to another machine."""


@frozen(kw_only=True)
class Traffic:
    """Requests of one row, and of several; lengths are log-normal between 4 and ``most_tokens``."""

    median_tokens: int = 64
    spread: float = 1.0
    """Standard deviation of the lengths' logarithm; 0 if all are equal."""
    most_tokens: int = 512
    several_share: float = 0.1
    """Of requests, those with several rows."""
    rows_of_several: int = 8
    clients: int = 16
    lengths: tuple[int, ...] = field(init=False)

    @lengths.default
    def _quantiles(self) -> tuple[int, ...]:
        if not self.spread:
            return (self.median_tokens,)
        normal = NormalDist(math.log(self.median_tokens), self.spread)
        logs = [normal.inv_cdf((number + 0.5) / QUANTILES) for number in range(QUANTILES)]
        return tuple([min(self.most_tokens, max(4, round(math.exp(each)))) for each in logs])

    @property
    def rows_per_request(self) -> float:
        """The mean."""
        return 1 + self.several_share * (self.rows_of_several - 1)

    @property
    def tokens_per_request(self) -> float:
        """The mean."""
        return self.rows_per_request * sum(self.lengths) / len(self.lengths)


@frozen(kw_only=True)
class Scenario:
    """One simulation: requests arrive at random for ``seconds``; what happens before ``warm_s`` is not counted."""

    device: Device
    costs: Costs
    engines: int = 1
    api_processes: int = 1
    processes_per_host: int = 8
    """API processes of one machine: they share what they have admitted."""
    traffic: Traffic = Traffic()
    load: float = 0.8
    """Of the tokens/s that all engines can compute."""
    seconds: float = 10.0
    warm_s: float = 2.0
    slow_engines: int = 0
    slowness: float = 4.0
    lost_engines: int = 0
    lost_at_s: float = 4.0
    back_at_s: float = 7.0
    retries_lost: bool = False
    compared: int = COMPARED
    max_queue_s: float = 1.0
    network_s: float = 1e-4
    """One way; assumed."""
    link_timeout_s: float = LINK_TIMEOUT_S
    longest_pause_s: float = max(HostConnector.pauses_s)
    """Between two attempts to connect."""
    seed: int = 0

    @property
    def window_s(self) -> float:
        """The time that counts."""
        return self.seconds - self.warm_s

    @property
    def heartbeat_s(self) -> float:
        """The longest time between two messages of an engine."""
        return self.link_timeout_s / HEARTBEATS_IN_TIMEOUT

    def slowness_of(self, position: int) -> float:
        """Return how many times slower than the device an engine is; the slow ones are among all others."""
        return self.slowness if position * self.slow_engines % self.engines < self.slow_engines else 1.0

    @property
    def full_engines(self) -> float:
        """Engines as fast as the device, and of slow ones what they amount to."""
        return self.engines - self.slow_engines * (1 - 1 / self.slowness)

    @property
    def capacity_per_s(self) -> float:
        """Requests/s of all engines, by their tokens."""
        return self.full_engines * self.device.tokens_per_s / self.traffic.tokens_per_request

    @property
    def requests_per_s(self) -> float:
        """Requests that arrive."""
        return self.load * self.capacity_per_s

    def seconds_of(self, rows: float) -> float:
        """Return how long an API process takes for a request, links included."""
        return (self.costs.request_s + (rows - 1) * self.costs.row_s) / (1 - self.link_share)

    @property
    def link_share(self) -> float:
        """Of an API process's time, what its idle links take."""
        return self.engines * self.costs.link_s


@frozen(kw_only=True)
class Outcome:
    """What became of the requests."""

    offered: int
    answered: int
    refused: int
    failed: int
    lost_rows: int
    """Rows at an engine when a link found that it was lost."""
    goodput_per_s: float
    p50_s: float
    p99_s: float
    busy: float
    """Mean share of time in which an engine computed, of that in which it was there."""
    imbalance: float
    """The largest such share, divided by the mean."""
    routing_us: float
    """Processor time per row: choosing an engine and giving the row to its link."""
    admission_us: float
    """Processor time per request."""
    tokens: tuple[int, ...]
    """That each engine has taken from its queue."""
