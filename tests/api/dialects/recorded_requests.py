"""Requests on lines of a file, each with the response that a scripted model's server gives.

``python -m tests.api.dialects.error_table`` writes the responses anew, for a reader to judge.
"""

import base64
import json
import re
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx

from tests.api.dialects.tei_models import Judging
from tests.api.scripted_models import (
    LONG,
    PROMPTS,
    Able,
    Chunkable,
    Dots,
    Everything,
    Judge,
    Labeller,
    LateInteraction,
    SparseOnly,
    serve_as,
)
from tests.api.serving import serving
from tests.conftest import wait_idle
from tests.rendering.media.images import ColourFormat, data_url, encoded
from tests.scripted_runner import ScriptedRunner
from tests.tensors import ROWS, WIDTH, as_npy
from trio_pool_serve.config import BatchConfig, Config, InputConfig, NetworkConfig
from trio_pool_serve.models.classification import SequenceClassifier
from trio_pool_serve.models.model_kind import ModelSpec
from trio_pool_serve.service import Service

REFUSED_REQUESTS = Path(__file__).parent / "refused_requests.txt"
ANSWERED_REQUESTS = Path(__file__).parent / "answered_requests.txt"
KEY = {"Authorization": "Bearer secret"}
REQUEST_ID = "the-request"

LINE = re.compile(r"(?P<method>[A-Z]+) (?P<path>\S+)(?: \[(?P<headers>[A-Z][\w-]*: .*?)\])?(?: (?P<body>[{\[<\"].*))?")
"""A request: its method, its path, changed headers in brackets, and its body."""

BODIES = {
    "<16 MiB and a byte>": b" " * (2**24 + 1),
    "<nothing>": b"",
    "<blanks>": b" \n\t ",
    "<a byte order mark>": b"\xef\xbb\xbf",
    "<a form>": b"input=hello",
    "<not UTF-8>": b"\xff",
    "<100,000 letters>": b"x" * 100_000,
    "<2049 texts>": json.dumps({"input": ["a"] * 2049}).encode(),
}
"""Bodies that do not fit on a line."""

NAMED = {
    "LONG": LONG,
    "NO_IMAGE": data_url(b"hello"),
    "IMAGE": data_url(encoded()),
    "BASE64": data_url(encoded()).partition(",")[2],
    "EMBEDS": base64.b64encode(as_npy(ROWS)).decode(),
}
"""What names in bodies stand for."""

TIMES = re.compile(r'(?<="created":)(1[7-9]|[2-9]\d)\d{8}|(?<=_duration":)\d+|(?<="modified_at":")[^"]+')
"""Seconds since 1970, later than in 2023, and durations."""


@attrs.frozen
class Model:
    """A kind of model; by default, ``spec`` and ``prompts`` are read from its files."""

    spec: ModelSpec | None = None
    prompts: Mapping[str, str] | None = None
    labels: int = 2
    inputs: InputConfig = attrs.Factory(InputConfig)
    has_template: bool = False
    reads_images: bool = False


SEVERAL_LABELS = SequenceClassifier(
    labels=("length", "sum", "first", "last", "zero"),
    problem_type="multi_label_classification",
    score_activation="torch.nn.modules.activation.Sigmoid",
)

MODELS: Mapping[str, Model] = {
    "A model for every task": Model(Everything(), PROMPTS),
    "A model for every task, with the prompts of its files": Model(Everything()),
    "A model with vectors of chunks": Model(Chunkable(), PROMPTS),
    "A model with sparse vectors": Model(SparseOnly(), PROMPTS),
    "A model with a chat template, on a server that accepts templates": Model(
        Everything(), PROMPTS, inputs=InputConfig(trust_request_chat_template=True), has_template=True
    ),
    "Late interaction by the number of a query's tokens in a document, and two labels": Model(Able(), PROMPTS),
    "The same, with the prompts of its files": Model(Able()),
    "A model that compares vectors by their products": Model(Dots()),
    "A reranker that reads pairs": Model(Judge(), labels=1),
    "A classifier without names for its labels": Model(Labeller()),
    "An embedding model": Model(),
    "An embedding model that reads images": Model(reads_images=True),
    "An embedding model on a server that accepts token embeddings": Model(
        inputs=InputConfig(enable_prompt_embeds=True)
    ),
    "A classifier of two labels": Model(Labeller(labels=("short", "heavy"))),
    "A classifier of pairs": Model(Judging(), labels=1),
    "A classifier of one label": Model(Everything(labels=("toxic",)), labels=1),
    "A classifier of several labels": Model(SEVERAL_LABELS, PROMPTS, labels=5),
    "Late interaction alone": Model(LateInteraction()),
}
"""The models of the sections of both files."""


def sections(path: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the sections of a file: a heading, and the requests with the answers that they should get."""
    for section in path.read_text().split("## ")[1:]:
        heading, *lines = filter(None, section.splitlines())
        yield heading, [(line, answer.strip()) for line, answer in zip(lines[::2], lines[1::2], strict=True)]


def message_of(answer: httpx.Response) -> str:
    """Return the message of an error in any dialect; empty for another response."""
    body = answer.json()
    error = body.get("error", "") if isinstance(body, dict) else ""
    return error if isinstance(error, str) else error["message"]


@attrs.frozen
class Asker:
    """Sends requests to a server of one model with a key."""

    service: Service
    http: httpx.AsyncClient
    runner: ScriptedRunner
    model: Model

    async def ask(self, path: str, body: Mapping[str, Any], *, key: bool = True) -> httpx.Response:
        """Return the response to a body."""
        headers = {"X-Request-Id": REQUEST_ID, **(KEY if key else {})}
        return await self.http.post(path.replace("{name}", "org/model"), json=body, headers=headers)

    async def answer(self, line: str) -> tuple[int, str]:
        """Return the status and the message of the response to a request on a line."""
        answer = await self._send(line)
        return answer.status_code, message_of(answer)

    async def record(self, line: str) -> str:
        """Return a response's status and body; of an error, field (in TEI's form, type) and message. Nothing stays."""
        self.runner.batches.clear()
        answer = await self._send(line)
        await wait_idle(self.service)
        if answer.status_code == 200:
            return "200 " + TIMES.sub("…", answer.text.replace(LONG, "LONG"))
        error, kind = answer.json()["error"], answer.json().get("error_type")
        name = error["param"] if isinstance(error, dict) else kind
        field = f"[{name}] " if name else ""
        # Texts beside an image may be computed before it has been read, or refused.
        has_image = self.model.reads_images or "image" in line.lower()
        computed = ", computed" if self.runner.batches and not has_image else ""
        return f"{answer.status_code}{computed} {field}{message_of(answer)}"

    async def _send(self, line: str) -> httpx.Response:
        request = LINE.fullmatch(line)
        assert request is not None, line
        changes = (change.partition(": ") for change in (request["headers"] or "").split("; ") if change)
        headers = {**KEY, "Content-Type": "application/json", "X-Request-Id": REQUEST_ID}
        headers |= {name: value for name, _, value in changes}
        body = request["body"] or ""
        return await self.http.request(
            request["method"],
            request["path"],
            content=BODIES.get(body, written_out(body).encode()),
            headers={name: value for name, value in headers.items() if value},
        )


def written_out(body: str) -> str:
    """Return a body with what names in it stand for, its long strings and its long lists."""
    for name, meant in NAMED.items():
        body = body.replace(name, meant)
    body = re.sub(r'"([^"]+?) × (\d+)"', lambda match: f'"{match[1] * int(match[2])}"', body)
    return re.sub(
        r"\[([^\[\]]+|\[[^\[\]]+\]) × (\d+)\]", lambda match: f"[{', '.join([match[1]] * int(match[2]))}]", body
    )


@asynccontextmanager
async def asker(folder: Path, model: Model) -> AsyncIterator[Asker]:
    """Serve a scripted model of a kind."""
    with tempfile.TemporaryDirectory() as data:
        config = Config(
            models=(f"org/model={folder}",),
            network=NetworkConfig(api_key="secret"),
            batch=BatchConfig(data_dir=Path(data)),
            input=model.inputs,
        )
        runner = ScriptedRunner(labels=model.labels, embeds_width=WIDTH if model.inputs.enable_prompt_embeds else 0)
        async with serving(config, runner) as (service, client):
            if model.spec is not None:
                serve_as(service, model.spec, **({"prompts": model.prompts} if model.prompts else {}))
            if model.reads_images:
                service.models.find().loaded.renderer.conversations.image_format = ColourFormat()
            yield Asker(service, client, runner, model)


async def recorded(path: Path, folder: Path, chat_folder: Path) -> str:
    """Return the text of a file with the responses of a server of each model, which answers after them, too."""
    text = path.read_text().partition("## ")[0]  # noqa: ASYNC240
    for heading, rows in sections(path):
        model = MODELS[heading]
        async with asker(chat_folder if model.has_template else folder, model) as asking:
            answers = [f"{line}\n    {await asking.record(line)}\n" for line, _ in rows]
            text += f"## {heading}\n{''.join(answers)}\n"
            assert (await asking.ask("/tokenize", {"prompt": "hello"})).status_code == 200
    return text.rstrip() + "\n"
