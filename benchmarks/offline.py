"""The model without a server, in a process: ``open_offline`` starts it, ``python -m benchmarks.offline`` is it.

Jobs come in on standard input and results go out on standard output, a line of JSON each. The process lives through a
whole benchmark, so that what it measures is measured in turns with everything else, and does nothing in between.

Its arguments are those of ``trio-pool-serve serve`` for one of the models of ``bert_shapes``, which the ways ``runner``
and ``text`` then compute; without any, the packaged model.
"""

import gc
import math
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import trio
from attrs import define, field, frozen

from benchmarks.bert_shapes import bert_oracle
from benchmarks.model import MODEL_PATH, Texts, check_vectors, oracle_vectors

ROOT = Path(__file__).parent.parent

Way: TypeAlias = Literal["transformers", "runner", "text"]
"""transformers: AutoModel in the dtype that a server chooses here, mean of the tokens, length 1; from ids that are
tensors already.
runner: our own runner's ``launch``, which makes tensors of ids first.
text: the same from the text, tokenised by our own renderer: all that a server does but HTTP and waiting."""

BATCHES_OF_TEXTS = 16
"""Different batches that are computed in turns."""

WARM_UP_BATCHES = 3


@frozen(kw_only=True)
class OfflineJob:
    """Batches of ``batch`` texts of ``tokens`` tokens, one after the other."""

    way: Way = "transformers"
    threads: int = 1
    batch: int = 1
    tokens: int = 34
    seconds: float = 2.0


@frozen(kw_only=True)
class OfflineResult:
    """How fast they were computed; the milliseconds are those of a batch."""

    batches: int
    sequences_per_s: float
    mean_ms: float
    p50_ms: float
    least_cosine: float


def thread_counts() -> list[int]:
    """Return with how many threads the model is computed: one, two, and as many as there are cores."""
    cores = len(os.sched_getaffinity(0))
    return sorted({1, min(2, cores), cores})


@define(eq=False)
class Offline:
    """The process, as those who have it measure see it."""

    _process: trio.Process

    async def measure(self, job: OfflineJob) -> OfflineResult:
        """Have one job done. Cancellation: at once, and nothing more can be measured."""
        assert self._process.stdin is not None
        await self._process.stdin.send_all(msgspec.json.encode(job) + b"\n")
        return msgspec.json.decode(await self._line(), type=OfflineResult)

    async def _line(self) -> bytes:
        assert self._process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            received = await self._process.stdout.receive_some()
            if not received:
                await trio.sleep_forever()  # the process has ended: ``run_process`` raises for it
            line += bytes(received)
        return line


@asynccontextmanager
async def open_offline(*arguments: str) -> AsyncIterator[Offline]:
    """Run the process for as long as the block; ``CalledProcessError``, in a group, if it fails."""
    command = [sys.executable, "-m", "benchmarks.offline", *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    async with trio.open_nursery() as nursery:

        async def run(*, task_status: trio.TaskStatus[trio.Process]) -> None:
            await trio.run_process(command, cwd=ROOT, task_status=task_status, **pipes)

        process = await nursery.start(run)
        yield Offline(process)
        nursery.cancel_scope.cancel(reason="the block is left")


Compute: TypeAlias = Callable[[Any], Awaitable[np.ndarray]]
"""Computes the vectors of one batch, which has the form that its way takes."""


@define(eq=False)
class Model:
    """Everything that is loaded, each part when it is first needed."""

    arguments: Sequence[str] = ()
    """Those of a server, for a model of ``bert_shapes``; none: the packaged model."""
    texts: Texts = field(factory=Texts)
    checked: dict[tuple[Way, int, int, int], float] = field(factory=dict)
    """The least cosine with the oracle, by way, threads, batch and tokens."""
    _loaded: dict[str, Any] = field(factory=dict)
    _made: dict[tuple[int, int], list[list[str]]] = field(factory=dict)

    def batches(self, size: int, tokens: int) -> list[list[str]]:
        """Return texts in batches, the same on every call."""
        if (size, tokens) not in self._made:
            self._made[size, tokens] = [self.texts.make(size, tokens) for _ in range(BATCHES_OF_TEXTS)]
        return self._made[size, tokens]

    def prepare(self, way: Way, batches: list[list[str]]) -> tuple[Compute, list[Any]]:
        """Return what computes a batch, and the batches as it takes them."""
        if way == "transformers":
            tokenizer, compute = self._load("transformers", _load_transformers)
            return compute, [tokenizer(texts) for texts in batches]
        render, compute = self._load("runner", partial(_load_runner, self.arguments))
        if way == "runner":
            return compute, [[render(text) for text in texts] for texts in batches]

        async def from_texts(texts: list[str]) -> np.ndarray:
            return await compute([render(text) for text in texts])

        return from_texts, batches

    def oracle(self, texts: list[str]) -> np.ndarray:
        """Return the vectors of texts as transformers computes them in float32."""
        return bert_oracle(Path(self.arguments[0]), texts) if self.arguments else oracle_vectors(texts)

    def _load(self, name: str, load: Callable[[], Any]) -> Any:
        if name not in self._loaded:
            self._loaded[name] = load()
            gc.collect()
            gc.freeze()
        return self._loaded[name]


def _load_transformers() -> tuple[Callable[[list[str]], Any], Compute]:
    import torch
    from transformers import AutoModel, AutoTokenizer

    from trio_pool_serve.runner.device import resolve_dtype

    device = _device()
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH, local_files_only=True)
    model = AutoModel.from_pretrained(MODEL_PATH, dtype=resolve_dtype("auto", device), local_files_only=True)
    model = model.eval().to(device)

    def tokenise(texts: list[str]) -> Any:
        return tokenizer(texts, padding=True, return_tensors="pt").to(device)

    @torch.inference_mode()
    def forward(inputs: Any) -> np.ndarray:
        states = model(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"].unsqueeze(-1)
        means = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(means, dim=-1).cpu().numpy()

    async def compute(inputs: Any) -> np.ndarray:
        return forward(inputs)

    return tokenise, compute


def _load_runner(arguments: Sequence[str]) -> tuple[Callable[[str], Any], Compute]:
    from trio_pool_serve.cli import read_config
    from trio_pool_serve.config import Config, ModelConfig
    from trio_pool_serve.engine.placement import replicas_of
    from trio_pool_serve.models.folder import read_model_folder
    from trio_pool_serve.models.loading.renderer_loading import text_renderer_of
    from trio_pool_serve.models.loading.runner_loader import load_transformer
    from trio_pool_serve.models.loading.tokenizer_loading import load_tokenizer
    from trio_pool_serve.prompts import RenderingParams, TextPrompt
    from trio_pool_serve.threads.offload import Offload
    from trio_pool_serve.types import Batch, PoolingRequest

    packaged = Config(models=(MODEL_PATH,), loading=ModelConfig(max_model_len=512))
    config = read_config(arguments) if arguments else packaged
    loading, threads = config.sources[0].loading, replicas_of(config)
    folder = read_model_folder(Path(config.models[0]), loading)
    renderer = text_renderer_of(folder, load_tokenizer(folder, trust_remote_code=False), workers=1)
    # As in a server, but for the thread that waits for copies: there is no event loop to keep free.
    runner = load_transformer(folder, loading, Offload(launch=threads, in_threads=False))
    runner.prepare(config.scheduling.wanted_batch_tokens)
    params = RenderingParams()

    def render(text: str) -> PoolingRequest:
        return PoolingRequest(renderer.render(TextPrompt(text), params))

    async def compute(requests: list[PoolingRequest]) -> np.ndarray:
        rows = await runner.launch(Batch(tuple(requests)))
        return np.stack([row[0] for row in rows])

    return render, compute


def _device() -> Any:
    from trio_pool_serve.runner.device import resolve_device

    return resolve_device("auto")


async def do_job(model: Model, job: OfflineJob) -> OfflineResult:
    """Check a batch's vectors, once, then compute batches for the requested time. Raises ``WrongAnswerError``."""
    import torch

    torch.set_num_threads(job.threads)
    batches = model.batches(job.batch, job.tokens)
    compute, inputs = model.prepare(job.way, batches)
    what = (job.way, job.threads, job.batch, job.tokens)
    if what not in model.checked:
        model.checked[what] = check_vectors(await compute(inputs[0]), model.oracle(batches[0]))
    turns: Iterator[Any] = cycle(inputs)
    for _ in range(WARM_UP_BATCHES):
        await compute(next(turns))
    times = []
    began = now = time.perf_counter()
    while now - began < job.seconds:
        before = now
        await compute(next(turns))
        now = time.perf_counter()
        times.append(now - before)
    times.sort()
    return OfflineResult(
        batches=len(times),
        sequences_per_s=len(times) * job.batch / (now - began),
        mean_ms=1e3 * (now - began) / len(times),
        p50_ms=1e3 * times[math.ceil(len(times) / 2) - 1],
        least_cosine=model.checked[what],
    )


async def main() -> None:
    """Do jobs until there are no more."""
    model = Model(sys.argv[1:])
    for line in sys.stdin.buffer:
        result = await do_job(model, msgspec.json.decode(line, type=OfflineJob))
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    trio.run(main)
