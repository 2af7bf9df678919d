"""How many times MiniLM's texts per second does a static embedding give, over HTTP and in bulk.

Both have MiniLM's tokenizer, and MiniLM is computed as it comes; the table is random, as large as potion-base-8M's.
A command embeds tables with each model in turns; then requests of many texts go to two servers in turns.

    python -m benchmarks.static
"""

import json
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import cyclopts
import numpy as np
from attrs import frozen
from cyclopts import Parameter
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from benchmarks.aim import COLUMNS, Aim
from benchmarks.bulk import embed
from benchmarks.load import LoadJob, run_load
from benchmarks.model import MODEL_PATH, Texts
from benchmarks.report import RESULTS, Numbers, Report, command_of, open_steps, print_table
from benchmarks.rounds import Rounds
from benchmarks.variants import OURS, Variant, open_variants

DIMENSIONS = 256

BASE64 = {"encoding_format": "base64"}

WAYS = {way: Aim(row=f"{way}: texts/s ÷ MiniLM's", at_least=15, aim=15) for way in ("HTTP", "bulk")}

Key: TypeAlias = tuple[str, int, str]
"""The way, the tokens of a text, the model."""


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings: ``clients`` at a time, each with requests of ``texts``; a table of ``rows``; ``tokens`` of each."""

    rounds: int = 5
    seconds: float = 8.0
    clients: int = 4
    texts: int = 64
    tokens: Numbers = (8, 32)
    rows: int = 20_000
    output_dir: Path = RESULTS


@frozen
class Rate:
    """Texts per second, and the CPU time of the server per text if it was measured."""

    texts_per_s: float
    server_cpu_us: float | None = None


def write_static(folder: Path) -> Path:
    """Write a model2vec folder with MiniLM's tokenizer."""
    folder.mkdir()
    tokenizer = Tokenizer.from_file(f"{MODEL_PATH}/tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.save(f"{folder}/tokenizer.json")
    table = np.random.default_rng(0).standard_normal((tokenizer.get_vocab_size(), DIMENSIONS), np.float32)
    save_file({"embeddings": table}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))
    return folder


async def run(settings: Settings) -> None:
    """Measure and report."""
    report, rounds, texts = Report("static", settings), Rounds[Key](), Texts()
    with (
        TemporaryDirectory() as name,
        open_steps("static", 4 * len(settings.tokens) * (settings.rounds + 1)) as step,
    ):
        folder = Path(name)
        models = {"MiniLM": MODEL_PATH, "static": str(write_static(folder / "static"))}
        tables = {tokens: folder / f"{tokens}.jsonl" for tokens in settings.tokens}
        for tokens, table in tables.items():
            lines = [json.dumps({"text": text}) + "\n" for text in texts.make(settings.rows, tokens)]
            table.write_text("".join(lines))
        for number in range(settings.rounds + 1):
            for model, path in models.items():
                for tokens, table in tables.items():
                    step(f"bulk, {model}, {tokens} tokens")
                    rows_per_s, _ = await embed(path, table, folder / f"{model}{tokens}-{number}.parquet", 5.0)
                    if number:  # the first round warms up
                        rounds.add(("bulk", tokens, model), Rate(rows_per_s))
        variants = [OURS, Variant(name="static", model=models["static"])]
        async with open_variants(variants) as servers:
            ports = dict(zip(models, servers.values(), strict=True))
            for number, (model, server), tokens in product(range(settings.rounds + 1), ports.items(), settings.tokens):
                step(f"HTTP, {model}, {tokens} tokens")
                bodies = [json.dumps({"input": texts.make(settings.texts, tokens)} | BASE64) for _ in range(16)]
                load = {"clients": settings.clients, "seconds": settings.seconds, "server_pid": server.pid}
                result = await run_load(LoadJob(port=server.port, bodies=bodies, **load))
                if number:
                    cpu_us = 1e3 * (result.server_cpu_ms or 0) / settings.texts
                    rounds.add(("HTTP", tokens, model), Rate(result.requests_per_s * settings.texts, cpu_us))
    show(rounds, settings)
    report.write(
        ratios={
            f"{way}, {tokens} tokens": ratio(rounds, way, tokens) for way, tokens in product(WAYS, settings.tokens)
        },
        results=rounds.as_document("way", "tokens", "model"),
    )


def ratio(rounds: Rounds[Key], way: str, tokens: int) -> float:
    """Return how many times as many texts per second the static embedding computes as MiniLM."""
    return rounds.ratio((way, tokens, "static"), "texts_per_s", (way, tokens, "MiniLM"))


def show(rounds: Rounds[Key], settings: Settings) -> None:
    """Print the tables."""
    rows = []
    for way, tokens in product(WAYS, settings.tokens):
        rates = [f"{rounds.median((way, tokens, model), 'texts_per_s'):.0f}" for model in ("MiniLM", "static")]
        is_http = way == "HTTP"
        cpu = f"{rounds.median((way, tokens, 'static'), 'server_cpu_us'):.0f}" if is_http else "–"
        rows.append([way, f"{tokens}", *rates, f"{ratio(rounds, way, tokens):.1f}", cpu])
    print_table(
        f"texts/s: over HTTP {settings.clients} clients with {settings.texts} texts in each request",
        ["", "tokens", "MiniLM", "static", "ratio", "static: the server's CPU time per text, µs"],
        rows,
    )
    longest = settings.tokens[-1]
    print_table("target", ["", *COLUMNS], [aim.cells(ratio(rounds, way, longest)) for way, aim in WAYS.items()])


main = command_of(run)


if __name__ == "__main__":
    cyclopts.run(main)
