"""Two threads that load a model's parts at once, in a process that has not imported transformers yet."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.vision_families import clip

PROGRAM = """
import sys
from threading import Event, Thread

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.folder import open_model_folder
from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer

assert "transformers" not in sys.modules
begun, go_on = Event(), Event()


class Pause:
    '''Stops the first import of transformers in its middle.'''

    def find_spec(name, path=None, target=None):
        if name == "transformers.utils" and not begun.is_set():
            begun.set()
            assert go_on.wait(60)
        return None


sys.meta_path.insert(0, Pause)
folder = open_model_folder(FOLDER, ModelConfig())
failures = []


def note_failure(function):
    try:
        function()
    except BaseException as error:
        failures.append(error)


first = Thread(target=note_failure, args=[lambda: load_tokenizer(folder)])
first.start()
assert begun.wait(60)
second = Thread(target=note_failure, args=[lambda: load_tokenizer(folder)])
second.start()
second.join(0.5)
assert second.is_alive()  # it waits for the first
go_on.set()
first.join()
second.join()
assert not failures, failures
print("both have loaded")
"""


@pytest.mark.slow
def test_two_threads_that_load_import_transformers_one_after_the_other(scripted_folder: Path):
    program = PROGRAM.replace("FOLDER", repr(str(scripted_folder)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "both have loaded", done.stderr


def test_that_a_model_reads_images_is_told_without_transformers_and_the_hub(tmp_path: Path):
    """The process that asks may be one that does without torch, which transformers would find while it is imported."""
    folder = clip(tmp_path / "clip")
    program = (
        "import sys; from trio_pool_serve.config import ModelConfig; "
        "from trio_pool_serve.models.folder import peek_folder; "
        f"print(peek_folder({str(folder)!r}, ModelConfig()).reads_images, "
        "{'transformers', 'huggingface_hub'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["True", "set()"], done.stderr
