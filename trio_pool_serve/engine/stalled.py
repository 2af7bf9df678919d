"""When an engine is stalled: it is ready, but there were no results for longer than ``stall_timeout_s``."""


def stall_of_batches(oldest_s: float, timeout_s: float) -> str:
    """Return why an engine is stalled whose oldest batch was launched ``oldest_s`` ago; empty if it is not."""
    return f"a batch has been in flight for {oldest_s:.0f} s" if oldest_s > timeout_s else ""


def stall_of_link(silent_s: float, reported: str, unanswered_s: float, timeout_s: float) -> str:
    """Return why the engine process at the other end of a link is stalled; empty if it is not.

    It has sent nothing for ``silent_s``, and no outputs for ``unanswered_s`` although rows are due. ``reported`` is
    what it says about its own batches.
    """
    if silent_s > timeout_s:
        return f"the engine process has been silent for {silent_s:.0f} s"
    if not reported and unanswered_s > timeout_s:
        return f"the engine process has answered no rows for {unanswered_s:.0f} s"
    return reported
