"""A child process that says hello, or what is no message, and leaves with status 7 when its parent lets it.

Before, it may fork a process that lives on.
"""

import os
import signal

import msgspec

from trio_pool_serve.processes.child_process import run_as_child, send_to_parent, wait_for_parent
from trio_pool_serve.processes.framed_stream import FramedStream


class Job(msgspec.Struct, tag=True, array_like=True):
    garbage: bytes
    forks: bool = False


class Said(msgspec.Struct, tag=True, array_like=True):
    text: str


async def main(channel: FramedStream[Job], job: Job) -> int:
    if job.forks and os.fork() == 0:
        signal.pause()
    if job.garbage:
        await channel.stream.send_all(job.garbage)
    else:
        await send_to_parent(channel, Said("hello"))
    await wait_for_parent(channel)
    return 7


if __name__ == "__main__":
    run_as_child(main, Job)
