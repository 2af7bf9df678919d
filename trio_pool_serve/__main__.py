"""The ``trio-pool-serve`` command, which a signal may end before it is imported; also ``python -m trio_pool_serve``."""

import gc
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

from trio_pool_serve.telemetry.start_display import begin_display, clear_display

SHORT = {"--help", "-h", "--help-all", "--version"}
"""Flags with which nothing is served."""


def main() -> None:
    """Run the command line."""
    serves = sys.argv[1:2] in (["serve"], ["engine"]) and not SHORT & {*sys.argv}
    for number in (signal.SIGTERM, signal.SIGINT) if serves else ():
        signal.signal(number, _leave)  # until the server receives them: imports take seconds
    if serves:
        gc.disable()  # until all is imported: an eighth of the time that this takes, as next to nothing is garbage
        if sys.stderr.isatty() and not any("json" in argument for argument in sys.argv):
            begin_display("Importing packages")
    from trio_pool_serve import cli
    from trio_pool_serve.processes.standard_error import detach_standard_error

    if serves:
        detach_standard_error()
    cli.main()


def _leave(*_: object) -> NoReturn:
    with suppress(OSError):
        os.write(2, clear_display())
    os._exit(0)


if __name__ == "__main__":
    main()
