"""The ``trio-pool-serve`` command, which a signal may end before it is imported; also ``python -m trio_pool_serve``."""

import gc
import os
import signal
import sys


def main() -> None:
    """Run the command line."""
    serves = sys.argv[1:2] in (["serve"], ["engine"])
    for number in (signal.SIGTERM, signal.SIGINT) if serves else ():
        signal.signal(number, lambda *_: os._exit(0))  # until the server receives them: imports take seconds
    if serves:
        gc.disable()  # until all is imported: an eighth of the time that this takes, as next to nothing is garbage
    from trio_pool_serve import cli
    from trio_pool_serve.processes.standard_error import detach_standard_error

    if serves:
        detach_standard_error()
    cli.main()


if __name__ == "__main__":
    main()
