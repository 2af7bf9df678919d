"""Which device gets the next batch.

Among several device servers it is the one expected to finish the batch first, by the time that batches of its size took
there: a slow idle server leaves a lone row to a fast one that will be free soon. A server in another zone takes only
rows that have waited for ``OTHER_ZONE_S``. While there are short rows, one device is kept free of long ones.
"""

import math
from collections.abc import Sequence

from trio_pool_serve.engine.batch_source import BatchSource
from trio_pool_serve.engine.device import Device

OTHER_ZONE_S = 0.05
"""Between zones, bytes cost money and about a millisecond."""


def devices_in_turn(devices: Sequence[Device], source: BatchSource, zone: str = "") -> tuple[Sequence[Device], float]:
    """Return the devices that may get the next batch now, starting with the one that would finish it first.

    A device gets the rows that the ones before it leave: long rows. Also return the seconds after which another device
    may get the rows that wait in ``source``. ``zone`` is that of this process; empty if it has none.
    """
    free = [each for each in devices if each.room > 0]
    # With one device, as in this process, there is nothing to choose; suspects and planned batches have no turn.
    if len(devices) == 1 or not free or not source.tokens:
        return free, math.inf
    # If no device of this zone is available, rows would wait for nothing.
    in_zone = [each for each in devices if each.zone == zone]
    if zone and in_zone and (waited_s := source.oldest_s) < OTHER_ZONE_S:
        devices, free = in_zone, [each for each in free if each in in_zone]
        if not free:
            return [], OTHER_ZONE_S - waited_s
    waiting = source.tokens
    seconds = min([each.done_in_s(waiting) for each in free])
    # A busy device that would be done sooner takes its part of the rows; the free ones get what is left.
    for each in devices:
        if each not in free and each.done_in_s(waiting) < seconds:
            waiting -= each.limits.max_tokens
    if waiting <= 0:
        return [], seconds
    return sorted(free, key=lambda each: each.done_in_s(waiting)), math.inf


def leaves_long(device: Device, devices: Sequence[Device]) -> bool:
    """Return whether a device leaves long rows to the other ``devices``, so that it stays free for short rows."""
    if device.computes_ahead and device.long_batches:
        return False
    # One launch stays free. A single launch cannot: long rows would never be computed.
    most = sum([each.launches for each in devices]) - 1
    return 0 < most <= sum([each.long_batches for each in devices])
