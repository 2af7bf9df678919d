"""Signals of a server's processes."""

import subprocess
import sys

PROGRAM = """
import signal
import trio
from trio.testing import wait_all_tasks_blocked
from trio_pool_serve.processes.signals import watch_reloads

async def main():
    async with trio.open_nursery() as nursery:
        await nursery.start(watch_reloads, trio.sleep_forever)
        for _ in range(2):
            signal.raise_signal(signal.SIGHUP)
            await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    signal.raise_signal(signal.SIGHUP)

trio.run(main)
"""


def test_a_process_that_ends_while_files_are_reloaded_is_not_killed_by_another_sighup():
    """Neither by one that came during the reload, nor by one that comes later."""
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False, timeout=60).returncode == 0
