"""The latencies of ``trio-pool-serve bench`` as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from trio_pool_serve.load.bench_result import ServerResult


def write_plot(results: Sequence[ServerResult], path: Path) -> None:
    """Write a PNG: which share of requests took at most how long. Blocks for a second. Raises ``OSError``."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for result in results:
        latencies = result.latencies_ms
        if latencies:
            shares = [(index + 1) / len(latencies) for index in range(len(latencies))]
            axes.step(latencies, shares, where="post", label=f"{result.url}: {result.requests_per_s:.1f} requests/s")
    axes.set(xlabel="latency, ms", ylabel="share of requests within it", xscale="log", ylim=(0, 1.01))
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=130, format="png")
