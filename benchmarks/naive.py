"""The server to compare with: what a competent engineer writes in an hour.

Everything is in one process. JSON and tokenising are on the event loop; one task computes all that
is pending as one padded batch in a thread; answers are Python lists of floats.

    python -m benchmarks.naive MODEL --port N
"""

from argparse import ArgumentParser

import torch
import trio
from attrs import define, field
from hypercorn.config import Config
from hypercorn.trio import serve
from quart import request
from quart_trio import QuartTrio
from transformers import AutoModel, AutoTokenizer

from trio_pool_serve.runner.device import resolve_dtype

COMPUTE_THREADS = 2


@define(eq=False)
class Row:
    """A text that waits for its vector."""

    ids: list[int]
    done: trio.Event = field(factory=trio.Event)
    vector: list[float] = field(factory=list)


def create_app(path: str) -> QuartTrio:
    """Return the app; the model is loaded here and now."""
    torch.set_num_threads(COMPUTE_THREADS)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = AutoModel.from_pretrained(
        path, dtype=resolve_dtype("auto", torch.device("cpu")), local_files_only=True
    ).eval()
    app = QuartTrio(__name__)
    pending: list[Row] = []
    arrived = trio.Event()

    def forward(rows: list[Row]) -> list[list[float]]:
        inputs = tokenizer.pad({"input_ids": [row.ids for row in rows]}, return_tensors="pt")
        with torch.inference_mode():
            states = model(**inputs).last_hidden_state.float()
        mask = inputs["attention_mask"].unsqueeze(-1)
        means = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(means, dim=-1).tolist()

    async def compute() -> None:
        nonlocal arrived
        while True:
            await arrived.wait()
            arrived = trio.Event()
            batch = pending.copy()
            pending.clear()
            for row, vector in zip(batch, await trio.to_thread.run_sync(forward, batch), strict=True):
                row.vector = vector
                row.done.set()

    @app.before_serving
    async def start() -> None:
        app.nursery.start_soon(compute)

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    @app.post("/v1/embeddings")
    async def embeddings():
        body = await request.get_json()
        texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
        rows = [Row(ids) for ids in tokenizer(texts, truncation=True)["input_ids"]]
        pending.extend(rows)
        arrived.set()
        for row in rows:
            await row.done.wait()
        data = [{"object": "embedding", "index": i, "embedding": row.vector} for i, row in enumerate(rows)]
        tokens = sum(len(row.ids) for row in rows)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": path, "usage": usage}

    return app


def main() -> None:
    """Serve until SIGTERM."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    config = Config()
    config.bind = [f"127.0.0.1:{arguments.port}"]
    config.keep_alive_max_requests = 1_000_000  # as ours: the default closes busy connections
    trio.run(serve, create_app(arguments.model), config)


if __name__ == "__main__":
    main()
