"""Background work goes last: planned batches are computed when no other row waits, or by threads at idle priority.

The dispatcher takes a planned batch once it has no other batch to take. It has to ask for this room first.
"""


def background_room(launches: int, in_flight: int, *, room: int, others_wait: bool) -> int:
    """Return how many more planned batches a device may launch, of which ``in_flight`` are launched.

    ``launches`` are its threads of idle priority, which compute beside all others. If it has none, planned batches
    have the ``room`` of other batches, but only while no other row waits.
    """
    if launches:
        return launches - in_flight
    return 0 if others_wait else room
