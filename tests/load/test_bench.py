"""``trio-pool-serve bench`` against this server, and against another one that fails in every way."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from quart import Response, request
from quart_trio import QuartTrio
from rich.console import Console

from tests.conftest import listening, until
from tests.server.server_process import ROOT
from trio_pool_serve.load import run_bench as module
from trio_pool_serve.load.bench_options import LoadOptions, RequestOptions
from trio_pool_serve.load.bench_result import Round, ServerResult, histogram, ratios
from trio_pool_serve.load.run_bench import BenchError, bodies_of, first_model, measure, run_bench, target_of
from trio_pool_serve.service import Service

BENCH = (sys.executable, "-m", "trio_pool_serve", "bench")
QUIET = Console(stderr=True, force_terminal=False)
SHORT = LoadOptions(clients=4, duration=0.3)
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have requests measured at once, and given up early."""
    monkeypatch.setattr(module, "WARMUP_S", 0.0)
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)


def other_server() -> QuartTrio:
    """The API of another server: every second request ends in another way than the last one of them."""
    app = QuartTrio(__name__)
    seen: list[dict[str, Any]] = []
    app.seen = seen

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "other"}]}

    @app.post("/v1/embeddings")
    async def embeddings() -> Any:
        seen.append(await request.get_json())
        match len(seen) % 8:
            case 1:
                return {"error": "[bold]no[/]"}, 500
            case 3:
                return "slow down", 429, {"Retry-After": "1"}
            case 5:
                await trio.sleep(1)
            case 7:
                return Response("<html>", 200, mimetype="text/html")
        return {"data": [{"index": 0, "embedding": [1.0]}], "usage": {"total_tokens": 7}}

    return app


@pytest.mark.usefixtures("short")
async def test_this_server_is_measured_on_every_route(url: str):
    for route in ("/v1/embeddings", "/v1/score", "/embed"):
        (result,), stopped = await measure([url], SHORT, RequestOptions(route=route, texts=2, tokens=8), QUIET)
        assert set(result.outcomes) == {"200"}, (route, result.reasons)
        assert not stopped
        assert result.requests_per_s > 0
        if route == "/v1/embeddings":
            assert result.tokens_per_s == pytest.approx(2 * 8 * result.requests_per_s)


@pytest.mark.parametrize("loop", [{"clients": 4}, {"rate": 60.0}], ids=["closed", "open"])
@pytest.mark.usefixtures("short")
async def test_another_server_that_fails_in_every_way_is_measured(loop: dict[str, Any]):
    app = other_server()
    async with listening(None, app) as url:
        load = LoadOptions(duration=0.6, **loop)
        (result,), _ = await measure([f"{url}/v1"], load, RequestOptions(), QUIET)
    outcomes = result.outcomes
    assert set(outcomes) == {"200", "429", "500", "timeout"}
    assert sum(outcomes.values()) == len(app.seen)
    assert result.failed == sum(outcomes.values()) - outcomes["200"]
    assert "no" in result.reasons["500"]
    assert result.reasons["429"] == "slow down"
    assert app.seen[0]["model"] == "other"
    assert result.tokens_per_s is None, "one of the responses was a page that counts no tokens"


async def test_the_command_writes_its_results(tmp_path: Path):
    written = tmp_path / "bench.json"
    flags = ("--clients", "2", "--duration", "1", "--api-key", "secret-key", "--json", str(written))
    async with listening(None, other_server()) as url:
        done = await trio.run_process([*BENCH, url, *flags], capture_stdout=True, check=False, cwd=ROOT)
    assert done.returncode == 3
    for shown in ("[bold]no[/]", "× 429: slow down", "█"):
        assert shown in done.stdout.decode()
    document = json.loads(written.read_text())
    (server,) = document["servers"]
    assert server["outcomes"]["200"] == len(server["rounds"][0]["latencies_ms"])
    assert server["latency_ms"]["p50"] <= server["latency_ms"]["max"]
    assert "secret-key" not in json.dumps(document)


async def test_ctrl_c_shows_the_results_so_far(url: str, service: Service):
    command = [*BENCH, url, "--clients", "2", "--duration", "600", "--tokens", "4"]
    process = await trio.lowlevel.open_process(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        await until(lambda: service.models.find().engine.statistics().batches >= 20, 120)
        await trio.sleep(module.WARMUP_S)
        with trio.fail_after(120):
            process.send_signal(signal.SIGINT)
            shown, said = [b"".join([part async for part in stream]) for stream in (process.stdout, process.stderr)]
            assert await process.wait() == 128 + signal.SIGINT
    finally:
        process.kill()
    assert b"requests/s" in shown
    assert said == b"Stopped: these are the results so far.\n"


@pytest.mark.parametrize(
    ("url", "options", "file", "message"),
    [
        (NOWHERE, {}, None, "127.0.0.1:1 does not respond: [Errno 111]"),
        ("127.0.0.1:8000", {}, None, "is not the URL of a server"),
        ("http://user:secret-key@127.0.0.1:1", {}, None, "'http://127.0.0.1:1' is not the URL of a server"),
        (NOWHERE, {"model": "m", "route": "/v1/audio"}, None, "requires --body-file"),
        (NOWHERE, {"model": "m", "body_file": Path("/nowhere/bodies")}, None, "/nowhere/bodies cannot be read"),
        (NOWHERE, {}, Path("/nowhere/b.json"), "its folder does not exist"),
    ],
)
async def test_a_measurement_that_is_impossible_is_explained_in_one_line(
    url: str, options: dict[str, Any], file: Path | None, message: str, capfd
):
    assert await run_bench([url], SHORT, RequestOptions(**options), file) == 1
    shown = capfd.readouterr().err
    assert message in shown
    assert "secret-key" not in shown
    assert len(shown.splitlines()) == 1


def test_a_load_is_closed_or_open():
    with pytest.raises(ValueError, match="not both"):
        LoadOptions(clients=1, rate=2)


async def test_a_server_that_lists_no_model_needs_its_name():
    async with listening(None, QuartTrio(__name__)) as url:
        with pytest.raises(BenchError, match=r"lists no model \(status 404\)\. Name one with --model"):
            await first_model(target_of(url, "/v1/embeddings"), None)


@pytest.mark.unit
def test_urls_with_and_without_v1_are_the_same():
    for url in ("http://host:80", "http://host/", "http://host/v1", "http://host/v1/"):
        target = target_of(url, "/v1/embeddings")
        assert (target.host, target.port, target.path, target.tls) == ("host", 80, "", None)
    assert target_of("https://host/base/v1", "/v1/rerank").path == "/base"
    assert target_of("https://host/base", "/rerank").port == 443
    assert target_of("http://[::1]:8000", "/v1/embeddings").authority == "[::1]:8000"


@pytest.mark.unit
def test_requests_have_the_fields_of_their_routes(tmp_path: Path):
    def bodies(**options: Any) -> list[dict[str, Any]]:
        return [json.loads(body) for body in bodies_of(RequestOptions(**options), "m")]

    one = bodies(tokens=10)
    assert len({body["input"] for body in one}) == len(one) == 512
    assert all(len(body["input"].split()) == 8 for body in one)
    assert len(bodies(texts=3)[0]["input"]) == 3
    ranked = bodies(route="/v1/rerank", texts=3)[0]
    assert (len(ranked["documents"]), type(ranked["query"])) == (3, str)
    assert bodies(route="/score")[0].keys() == {"model", "text_1", "text_2"}
    file = tmp_path / "bodies"
    file.write_text('{"a": 1}\n\n')
    assert bodies_of(RequestOptions(body_file=file, route="/any"), None) == [b'{"a": 1}']


def result_of(*rounds: list[float]) -> ServerResult:
    fixed = {"seconds": 1.0, "reasons": {}, "late_p99_ms": 0.0, "tokens": None}
    made = [Round(requests_per_s=len(each), latencies_ms=each, outcomes={"200": len(each)}, **fixed) for each in rounds]
    return ServerResult(url="http://host", texts_per_request=1, rounds=made)


@pytest.mark.unit
def test_ratios_are_medians_of_the_rounds_that_both_have():
    found = ratios(result_of([2.0] * 4, [4.0] * 2, [8.0] * 10), result_of([1.0] * 2, [1.0] * 2, [1.0] * 2, []))
    assert found == {"requests/s": 2.0, "p50": 4.0, "p99": 4.0}
    assert ratios(result_of([]), result_of([1.0])) == {}


@pytest.mark.unit
def test_a_histogram_has_every_latency_once():
    latencies = sorted([1.0, 1.0, 2.0, 10.0, 99.9, 100.0])
    buckets = histogram(latencies, 4)
    assert sum(count for _, _, count in buckets) == len(latencies)
    assert (buckets[0][0], buckets[-1][1]) == (1.0, 100.0)
    for low, high, count in buckets[:-1]:
        assert count == sum(low <= latency < high for latency in latencies)
    assert histogram([5.0, 5.0], 4) == [(5.0, 5.0, 2)]
