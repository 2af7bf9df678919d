"""How requests end, and quantiles of how long they take."""

import math
from collections.abc import Sequence

ANSWERED = "200"

TIMEOUT, RESET, CUT, NO_CONNECTION, NOT_SENT, NOT_HTTP = (
    "timeout", "reset", "cut off", "no connection", "not sent", "not HTTP",
)  # fmt: skip
"""How a request ends without a status: nothing for too long; the connection reset after it was accepted; closed before
a whole response; never accepted; never begun, for want of file descriptors or ports in the generator; answered with
something else."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ``values`` that ``share`` of them do not exceed; NaN if there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan
