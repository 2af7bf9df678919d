"""The dashboard: a real Prometheus scrapes a real server and an engine, and is asked every query of every panel."""

import json
import math
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import client_of
from tests.debian_programs import debian_program
from tests.server.server_process import ENGINE_PROGRAM, ROOT, free_port, scripted, started

MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text())
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
(CONFIGURATION,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)
KEY = "prometheus-key"
LIMIT_S = 120


def test_the_files_equal_the_generated_ones():
    generator = runpy.run_path(str(MONITORING / "generate.py"))
    files = dict(generator["files"]())
    assert len(files) == 3
    assert [path.name for path, text in files.items() if path.read_text() != text] == []


def test_panels_lie_beside_each_other():
    taken = []
    for place in (panel["gridPos"] for panel in DASHBOARD["panels"]):
        taken += [(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24
    numbers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(numbers)) == len(numbers)


def queries() -> Iterator[str]:
    """The queries of all panels, with Grafana's variables as they are for "All"."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield re.sub(r"\$(job|model)", ".*", target["expr"]).replace("$__rate_interval", "5s")


def configuration(folder: Path, server: int, engine: int) -> Path:
    """Write the page's configuration for the ports of a test, with an interval that suits it."""
    document = yaml.safe_load(CONFIGURATION)
    document["global"]["scrape_interval"] = document["global"]["evaluation_interval"] = "500ms"
    document["rule_files"] = [str(MONITORING / name) for name in document["rule_files"]]
    (folder / "metrics-key").write_text(KEY)
    text = yaml.safe_dump(document).replace(":8000", f":{server}").replace(":9001", f":{engine}")
    (folder / "prometheus.yml").write_text(text)
    return folder / "prometheus.yml"


def metrics_of(exposition: str) -> Iterator[tuple[str, str]]:
    """The names of metrics, as on the page of metrics, each with the values of its label ``of``."""
    for family in text_string_to_metric_families(exposition):
        name = family.name + ("_total" if family.type == "counter" else "")
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                yield name, sample.labels.get("of", "")


def documented() -> set[tuple[str, str]]:
    """What the page of metrics has, without what only servers with other settings have."""
    generator = runpy.run_path(str(ROOT / "docs" / "generate_metrics.py"))
    names = re.findall(r"^\| `(\w+)` \| (?:counter|histogram|gauge) ", generator["metrics_page"](), re.M)
    pairs = {(name, of) for name in names for of in generator["OF"].get(name, [""])}
    return {(name, of) for name, of in pairs if of != "client_template"}  # --trust-request-chat-template


async def ask(prometheus: httpx.AsyncClient, path: str, **parameters: str) -> Any:
    answer = await prometheus.get(f"/api/v1/{path}", params=parameters)
    assert answer.status_code == 200, (parameters, answer.text)
    return answer.json()["data"]


async def has_data(prometheus: httpx.AsyncClient, query: str) -> bool:
    results = (await ask(prometheus, "query", query=query))["result"]
    return any(math.isfinite(float(result["value"][1])) for result in results)


async def keep_asking(server: httpx.AsyncClient) -> None:
    """Send requests, some of which are refused, forever."""
    while True:
        for texts in (["a nursery"], ["one text", "and another text, of several words"], []):
            answer = await server.post("/v1/embeddings", json={"input": texts})
            assert answer.status_code == (200 if texts else 400), answer.text


@pytest.mark.slow
async def test_every_query_of_every_panel_has_data(tmp_path: Path, scripted_folder: Path):
    link, probes, at = free_port(), free_port(), free_port()
    keys, secret = tmp_path / "keys.toml", tmp_path / "secret"
    keys.write_text(f'[prometheus]\nkey = "{KEY}"\nadmin = true\n')
    secret.write_text("a key that is long enough: 0123456789")
    model = f"m={scripted_folder}"
    engine = [
        *(*ENGINE_PROGRAM, model, "--key-file", str(secret)),
        *("--listen", f"127.0.0.1:{link}", "--probe-listen", f"127.0.0.1:{probes}"),
    ]
    given = [
        *(model, "--api-keys-file", str(keys), "--engine-hosts", f"127.0.0.1:{link}", "--key-file", str(secret)),
        *("--engine", "process", "--replicas", "1"),
    ]
    with started(engine, probes, tmp_path / "engine.log", {}) as host:
        async with scripted(tmp_path, *given) as server:
            await host.wait_until("/readyz")
            prometheus = [
                debian_program("prometheus"),
                f"--config.file={configuration(tmp_path, server.port, probes)}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{at}",
            ]
            with started(prometheus, at, tmp_path / "prometheus.log", {}) as scraper:
                await scraper.wait_until("/-/ready")
                async with client_of(scraper.url) as asked, client_of(server.url) as client:
                    client.headers["Authorization"] = f"Bearer {KEY}"
                    await check_all(asked, client)
                    described = {*metrics_of((await client.get("/metrics")).text)}
            described |= {*metrics_of((await host.get("/metrics")).text)}
    assert described == documented()


async def check_all(prometheus: httpx.AsyncClient, server: httpx.AsyncClient) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_asking, server)
        left = [*queries()]
        assert len(left) > 50
        with trio.move_on_after(LIMIT_S):
            while left:
                await trio.sleep(0.5)  # a scrape
                left = [query for query in left if not await has_data(prometheus, query)]
        assert not left
        for variable in DASHBOARD["templating"]["list"][1:]:
            ((metric, label),) = re.findall(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            found = await ask(prometheus, f"label/{label}/values", **{"match[]": metric.replace("$job", ".*")})
            assert found == {"job": ["trio-pool-serve", "trio-pool-serve-engine"], "model": ["m"]}[variable["name"]]
        (rules,) = (await ask(prometheus, "rules"))["groups"]
        assert {rule["health"] for rule in rules["rules"]} == {"ok"}
        assert {rule["name"] for rule in rules["rules"] if rule["state"] == "firing"} == set()
        nursery.cancel_scope.cancel()
