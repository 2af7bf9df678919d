"""What the scripted servers do, by the first token id of a batch.

Waiting goes through named pipes, so that a test knows what a process is doing without looking at a clock.
"""

import gc
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np

from tests.scripted_runner import ScriptedRunner
from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError, RunnerDeadError
from trio_pool_serve.types import Batch, CopiedBatch, PooledBatch, RunnerParams

LOSES_THE_DEVICE, EXITS, HANGS, WAITS, RAISES, TELLS_SETTINGS = 13, 14, 15, 16, 17, 18


def follow_script(batch: Batch) -> PooledBatch | None:
    match batch.requests[0].prompt.token_ids[0]:
        case 13:
            raise RunnerDeadError("lost")
        case 14:
            raise SystemExit(3)
        case 15:
            threading.Event().wait()
        case 16:
            pipes = Path(os.environ["SCRIPT_PIPES"])
            (pipes / "launched").write_text("launched")
            (pipes / "go").read_text()
        case 17:
            raise ValueError("unlucky: SECRET-4711")
        case 18:
            return CopiedBatch([(np.array([*process_settings(), 0, 0, 0, 0], dtype=np.float32),)])
    return None


def process_settings() -> list[float]:
    """What a server sets of its process: objects frozen, switch interval (seconds), niceness of the calling thread
    above the main thread's, rounds that OpenMP's threads spin."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0) - os.getpriority(os.PRIO_PROCESS, os.getpid())
    return [gc.get_freeze_count(), sys.getswitchinterval(), niceness, float(os.environ.get("GOMP_SPINCOUNT", 0))]


class PlacedRunner(ScriptedRunner):
    """Says on which device it computes, as far as this process sees, and its share of the memory.

    ``SCRIPT_FREE_BYTES`` is a file with the free memory.
    """

    def __init__(self, device: str) -> None:
        placed = f"{device} of CUDA_VISIBLE_DEVICES={visible_devices()}"
        super().__init__(on_launch=follow_script, model_type=placed)

    def __call__(self, params: RunnerParams) -> ScriptedRunner:
        if params.memory_share is not None and "SCRIPT_FREE_BYTES" in os.environ:
            free = Path(os.environ["SCRIPT_FREE_BYTES"])
            self.model_type += f" with {params.memory_share(lambda: int(free.read_text()))} bytes"
        return super().__call__(params)


def visible_devices() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def load_scripted(folder, config: ModelConfig, *__) -> ScriptedRunner:
    """Load a runner, unless the file named by ``SCRIPT_BROKEN`` has this process's device in it.

    As the device is followed there, the process fails to load (``raises``) or ends (``exits``, ``is-killed``). With
    ``SCRIPT_LOADING``, a named pipe, it says that it loads, and never ends; so it does without, for a folder called
    ``endless``.
    """
    if folder.path.name == "endless":
        (Path(os.environ["SCRIPT_PIPES"]) / "launched").write_text("loading")
        threading.Event().wait()
    if "SCRIPT_LOADING" in os.environ:
        Path(os.environ["SCRIPT_LOADING"]).write_text("loading")
        threading.Event().wait()
    if "SCRIPT_LOAD_ERROR" in os.environ:
        raise ModelLoadError(os.environ["SCRIPT_LOAD_ERROR"])
    if "SCRIPT_BROKEN" in os.environ:
        broken = dict(line.split() for line in Path(os.environ["SCRIPT_BROKEN"]).read_text().splitlines())
        match broken.get(visible_devices()):
            case "raises":
                raise ModelLoadError(f"CUDA error: {visible_devices()} is broken")
            case "exits":
                os._exit(5)
            case "is-killed":
                os.kill(os.getpid(), signal.SIGKILL)
    return PlacedRunner(config.device)
