"""Which of a process's descendants are workers."""

import psutil


def forked_workers(of: psutil.Process) -> list[psutil.Process]:
    """Return the worker processes of a server: children of the process that they are forked from."""
    family = of.children(recursive=True)
    forked = [process for process in family if "forkserver import main" in " ".join(_command(process))]
    return [process for process in forked if process.ppid() in {parent.pid for parent in forked}]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []
