"""The ``trio-pool-serve`` command, which a signal may end before it is imported; also ``python -m trio_pool_serve``."""

import gc
import os
import signal
import sys

SHORT = {"--help", "-h", "--help-all", "--version"}
"""Flags with which nothing is served."""


def main() -> None:
    """Run the command line."""
    os.environ["PYTHONSAFEPATH"] = "1"  # processes that libraries start do not import from the current folder either
    serves = sys.argv[1:2] in (["serve"], ["engine"]) and not SHORT & {*sys.argv}
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it is closed; the first sockets would get its descriptor, the lowest free one
            file = open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123, SIM115
            os.set_inheritable(file.fileno(), True)  # noqa: FBT003
            setattr(sys, name, file)
    for number in (signal.SIGTERM, signal.SIGINT) if serves else ():
        signal.signal(number, _leave)  # until the server receives them: imports take seconds
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM) if serves else ():
        if signal.getsignal(number) is signal.SIG_DFL:  # it would end the process; child processes inherit this
            signal.signal(number, signal.SIG_IGN)
    if serves:
        gc.disable()  # until all is imported: an eighth of the time that this takes, as next to nothing is garbage
        if sys.stderr.isatty() and not any("json" in argument for argument in sys.argv):
            from trio_pool_serve.telemetry.terminal import begin_display

            begin_display("Importing packages")
    from trio_pool_serve import cli
    from trio_pool_serve.processes.standard_error import detach_standard_error

    if serves:
        detach_standard_error()
    cli.main()


def _leave(*_: object) -> None:
    try:
        if sys.stderr.isatty():
            os.write(2, b"\r\x1b[2K")  # the display; to end it could wait for what this signal has interrupted
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
