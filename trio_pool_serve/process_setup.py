"""Settings of a process that exists to run a service."""

import os
import sys

from trio_pool_serve.processes.allocator import freeze_objects, prepare_for_loading
from trio_pool_serve.service import Service
from trio_pool_serve.threads.scheduling import NICENESS, limit_openmp_spinning, relative_niceness

SWITCH_INTERVAL_S = 0.0005
"""For which a thread may hold the interpreter lock while the event loop waits for it: a tenth of Python's default."""


def configure_process(service: Service, niceness: int = NICENESS) -> None:
    """Configure a process that exists to run ``service``; call it before ``service.run`` and before torch is imported.

    Sets the interpreter's thread switch interval and, where models compute in this process, how OpenMP's threads wait.
    Limits the memory that malloc and oneDNN keep. Lowers the scheduling priority of the service's threads and worker
    processes by ``niceness``. Collects garbage rarely, and once the models are loaded exempts all objects that exist
    from it.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts are tokenised one at a time: 4 µs less for each
    if service.socket_folder is None:
        limit_openmp_spinning()
    prepare_for_loading()
    service.offload.niceness = relative_niceness(niceness)
    for processes in service.processes.values():
        processes.niceness = service.offload.niceness
    on_loaded = service.on_loaded

    def freeze_loaded_objects() -> None:
        freeze_objects()
        on_loaded()

    service.on_loaded = freeze_loaded_objects
