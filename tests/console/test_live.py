"""The live view in a browser: engines that are killed, keys, proxies, and servers that come back."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from playwright.sync_api import expect

from tests.console.pictures import VIEWS, fill, open_view, run
from tests.console.visit import TIMEOUT_MS, Visit
from tests.debian_programs import nginx_command
from tests.lanes import sampled
from tests.server.server_process import START_LIMIT_S, free_port, serving

KEY = "the-key"

SITE = """
server {{
    listen 127.0.0.1:{port};
    location /x/ {{
        proxy_pass {url}/;
        proxy_http_version 1.1;
    }}
}}
"""

NOTE_WHEN_BAD = """
() => new MutationObserver((_, observer) => {
  if (document.getElementById("state").dataset.level !== "bad") return;
  window.badSince = Date.now();
  observer.disconnect();
}).observe(document.getElementById("state"), { attributes: true })
"""
"""Has the page note when its badge becomes red, by the clock of this machine."""


def badge(page):
    return page.locator("#state")


def test_numbers_and_charts_follow_the_requests(visit, server_url):
    page = visit(server_url)
    expect(badge(page)).to_have_text("ready")
    for _ in range(3):
        httpx.post(f"{server_url}/v1/embeddings", json={"model": "minilm", "input": ["one", "two"]}, timeout=60)
    summary = page.locator(".card", has_text="Requests per second").locator(".hidden-text")
    expect(summary).to_contain_text("answered")
    expect(page.locator(".tile", has_text="Requests/s").locator("dd")).not_to_have_text("–")
    models = page.get_by_role("region", name="Models").locator("tbody tr")
    expect(models).to_have_count(8)
    drawn = page.locator(".chart canvas").first.evaluate(
        "canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value)"
    )
    assert drawn


@pytest.mark.slow
def test_a_second_viewer_sees_what_the_first_has_seen(visit, server_url):
    first = visit(server_url)
    note = first.locator("main > .hint")
    expect(note).to_contain_text("samples")
    first.wait_for_timeout(2500)
    second = visit(server_url)
    expect(second.locator("main > .hint")).to_contain_text("samples")
    count = int(second.locator("main > .hint").inner_text().split()[0])
    assert count >= 3


@pytest.mark.slow
def test_a_killed_engine_is_red_within_two_seconds_and_back_without_a_reload(browser, minilm, tmp_path):
    with serving(tmp_path, f"minilm={minilm}", "--engine", "process") as server, Visit(browser, server.url) as page:
        expect(badge(page)).to_have_attribute("data-level", "good")
        expect(page.get_by_role("region", name="Processes").locator("tbody tr")).to_have_count(2)
        page.evaluate(NOTE_WHEN_BAD)
        (engine,) = server.processes("trio_pool_serve.server.engine_process")
        killed = time.time()
        psutil.Process(engine.pid).kill()
        expect(badge(page)).to_have_attribute("data-level", "bad", timeout=TIMEOUT_MS)
        assert page.evaluate("window.badSince") / 1e3 - killed < 2
        row = page.get_by_role("region", name="Processes").locator("tr", has_text="engine")
        expect(row.locator(".badge")).to_have_attribute("data-level", "bad")
        expect(badge(page)).to_have_attribute("data-level", "good", timeout=START_LIMIT_S * 1000)
        expect(row.locator("td").nth(3)).to_have_text("1")  # restarts


@pytest.mark.slow
def test_a_server_that_is_gone_is_red_and_one_that_comes_back_is_shown(browser, minilm, tmp_path):
    port, arguments = free_port(), (f"minilm={minilm}",)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as servers:
        server = servers.enter_context(serving(first, *arguments, port=port))
        with Visit(browser, url, expected="Failed to load resource") as page:
            expect(badge(page)).to_have_text("ready")
            server.process.kill()
            server.process.wait()
            expect(badge(page)).to_have_text("no response")
            expect(badge(page)).to_have_attribute("data-level", "bad")
            servers.enter_context(serving(second, *arguments, port=port))
            expect(badge(page)).to_have_text("ready")
            expect(badge(page)).to_have_attribute("data-level", "good")


@pytest.mark.slow
def test_a_key_is_asked_for_and_kept_out_of_addresses(browser, minilm, tmp_path):
    with (
        serving(tmp_path, f"minilm={minilm}", "--api-key", KEY) as server,
        Visit(browser, server.url, expected="status of 401") as page,
    ):
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        dialog.get_by_label("Key").fill("wrong")
        dialog.get_by_role("button", name="Use this key").click()
        expect(dialog).to_be_visible()
        dialog.get_by_label("Key").fill(KEY)
        page.keyboard.press("Enter")
        expect(badge(page)).to_have_text("ready")
        page.get_by_role("tab", name="Similarity").click()
        page.locator("main form button.primary").click()
        expect(page.locator("main form [role=status].readout")).to_contain_text("Done")
        assert KEY not in page.url
        assert KEY not in page.locator("main").inner_text()
        page.locator("summary", has_text="curl").click()
        expect(page.locator("details pre").first).to_contain_text("Bearer $API_KEY")
        page.reload()
        expect(badge(page)).to_have_text("ready")
        assert page.evaluate("Object.keys(localStorage).concat(document.cookie).join()").find(KEY) < 0


@contextmanager
def nginx_before(url: str, folder: Path) -> Iterator[str]:
    """nginx in front of a server at the path ``/x/``; gives its URL."""
    port = free_port()
    process = subprocess.Popen(nginx_command(folder, SITE.format(port=port, url=url)))
    try:
        wait_for(port)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.slow
def test_every_view_works_behind_nginx_at_a_path(browser, server_url, tmp_path):
    with nginx_before(server_url, tmp_path) as url, Visit(browser, url, "/x/console") as page:
        expect(badge(page)).to_have_text("ready")
        first = page.locator("main > .hint").inner_text()
        expect(page.locator("main > .hint")).not_to_have_text(first)  # samples come one by one
        for view, fields in VIEWS.items():
            open_view(page, view)
            if view != "live":
                fill(page, fields)
                run(page)
                page.locator("summary", has_text="curl").first.click()
                assert f"{url}/x/" in page.locator("details pre").first.inner_text()


def wait_for(port: int) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(retries=10)) as client:
        client.get(f"http://127.0.0.1:{port}/x/livez")


@sampled("theme", ["light", "dark"], keep=["dark"])
def test_a_theme_that_is_chosen_stays(visit, server_url, theme):
    page = visit(server_url, color_scheme="dark" if theme == "light" else "light")
    page.get_by_label("Theme").select_option(theme)
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", theme)
