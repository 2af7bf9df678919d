"""Mutated tensors and images through real routes of a real process: an error at most, and little memory."""

import base64
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import torch
from attrs import define, field
from hypothesis import HealthCheck, Phase, given, settings
from PIL import Image

from tests.models.model_families import pooling, write_family
from tests.models.vision_families import clip
from tests.rendering.mutations import mutated
from tests.server.server_process import ROOT, ServerProcess, serving
from tests.tensors import FORMS

FEW, MANY = 120, 600

MOST_GROWTH = 300 * 2**20
"""Bytes: twice an image of ``small_images.MOST_PIXELS`` as floats, and what the decoders and threads keep."""

CORPUS = ROOT / "tests" / "rendering"
"""``media/corpus`` and ``embeds/corpus`` have the shortest file that was found for each message, and status."""

FLAGS = ("--engine", "local", "--enable-prompt-embeds", "--plugins", "tests.end_to_end.programs.small_images")


@define(eq=False)
class Driven:
    """A server that is sent files, and what it says of them."""

    server: ServerProcess
    width: int
    session: requests.Session = field(factory=requests.Session)
    peak_before: int = 0

    def post(self, **body: Any) -> requests.Response:
        return self.session.post(f"{self.server.url}/v1/embeddings", json=body, timeout=60)

    def send_embeds(self, file: bytes) -> requests.Response:
        return self.post(model="t", prompt_embeds=base64.b64encode(file).decode())

    def send_image(self, file: bytes) -> requests.Response:
        url = f"data:image/png;base64,{base64.b64encode(file).decode()}"
        return self.post(model="i", input=[url], modality="image")

    def peak(self) -> int:
        """The most memory that the process has had, in bytes."""
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])

    def check_well(self) -> None:
        """It is the same process, has logged no failure, and has not needed much memory."""
        assert self.post(model="t", input="hello").status_code == 200
        assert psutil.pid_exists(self.server.process.pid)
        assert "Traceback" not in self.server.log
        assert self.peak() - self.peak_before < MOST_GROWTH


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    folder = tmp_path_factory.mktemp("models")
    text = write_family(folder / "text", "bert", modules=[pooling("mean")])
    with serving(folder, f"t={text}", f"i={clip(folder / 'image')}", *FLAGS) as server:
        found = Driven(server, width=json.loads((text / "config.json").read_text())["hidden_size"])
        for file in embeds(found.width).values():
            assert found.send_embeds(file).status_code == 200
        for name, file in images().items():
            assert found.send_image(file).status_code == (422 if "TIFF" in name else 200), name
        found.peak_before = found.peak()
        yield found


def embeds(width: int) -> Mapping[str, bytes]:
    """Token embeddings in every form, as their libraries write them."""
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(0))
    found = {name: write(rows) for name, write in FORMS.items()}
    return {**found, "half": FORMS["safetensors"](rows.half()), "columns first": FORMS["npy"](rows.T.contiguous().T)}


def images() -> Mapping[str, bytes]:
    """A small picture in every format, and those that have more than one frame. TIFF is refused."""
    picture = Image.radial_gradient("L").resize((40, 30)).convert("RGB")
    frames = {"save_all": True, "append_images": [picture.rotate(90 * turn, expand=False) for turn in range(4)]}
    options: dict[str, Mapping[str, Any]] = {name: {} for name in ("PNG", "JPEG", "GIF", "WEBP", "BMP")}
    options |= {"TIFF": {"compression": "tiff_lzw"}, "progressive JPEG": {"progressive": True}}
    options |= dict.fromkeys(("animated GIF", "animated WEBP", "animated PNG", "pages TIFF"), frames)
    written = {name: io.BytesIO() for name in options}
    for name, file in written.items():
        picture.save(file, name.split()[-1], **options[name])
    return {name: file.getvalue() for name, file in written.items()}


def check_all(send: Callable[[bytes], requests.Response], files: Mapping[str, bytes], examples: int) -> set[int]:
    """Send mutations of files; return the statuses that they were answered with."""
    statuses = set()

    @settings(max_examples=examples, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(mutated(files))
    def check(file: bytes) -> None:
        answer = send(file)
        statuses.add(answer.status_code)
        assert answer.status_code < 500, (answer.text, file[:500])

    check()
    return statuses


@pytest.mark.parametrize("examples", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_no_mutation_of_token_embeddings_or_of_an_image_fails_the_server(driven: Driven, examples: int):
    assert {200, 400} <= check_all(driven.send_embeds, embeds(driven.width), examples)
    assert {200, 422} <= check_all(driven.send_image, images(), examples)
    driven.check_well()


@pytest.mark.parametrize("kind", ["media", "embeds"])
def test_files_of_the_corpus_are_answered(driven: Driven, kind: str):
    send = driven.send_image if kind == "media" else driven.send_embeds
    files = sorted((CORPUS / kind / "corpus").iterdir())
    assert len(files) > 10
    for file in files:
        answer = send(file.read_bytes())
        assert answer.status_code == int(file.name[:3]), (file.name, answer.text)
    driven.check_well()
