"""Nothing that clients send as input comes back in an error, or is in what a real server writes."""

import json
from collections.abc import Iterator
from itertools import product

import httpx
import pytest

from tests.conftest import client_of
from tests.server.programs import script
from tests.server.server_process import scripted

SECRET = "SECRET-4711"
WHOLE_LOG = "tests.server.programs.whole_log"
LONG = f"{SECRET} hello " * 60

TEXTS = (SECRET, LONG, [LONG], [SECRET, 5], {SECRET: SECRET}, [{"text": LONG}, {SECRET: 5}], [[LONG, LONG]], [[SECRET]])
NAMES = (
    *(("input",), ("inputs",), ("prompt",), ("texts",), ("sentences",), ("queries", "documents")),
    *(("query", "documents"), ("query", "texts"), ("text_1", "text_2"), ("data_1", "data_2")),
)
IMAGES = (
    f"file:///{SECRET}.png",
    f"http://127.0.0.1:1/{SECRET}",
    f"https://{SECRET}@127.0.0.1/",
    f"data:image/png;base64,{SECRET}",
    SECRET,
)


def contents(image: str) -> list[dict[str, object]]:
    parts = [{"type": "text", "text": SECRET}, {"type": "image_url", "image_url": {"url": image}}]
    return [{"role": SECRET, "content": parts}]


def bodies() -> Iterator[bytes]:
    """Bodies with marked inputs, each wrong for most routes and right for some."""
    for text in TEXTS:
        for names in NAMES:
            yield json.dumps(dict.fromkeys(names, text)).encode()
    for image in IMAGES:
        yield json.dumps({"messages": contents(image)}).encode()
        yield json.dumps({"images": [image], "input_type": "image"}).encode()
        yield json.dumps({"input": [{"content": contents(image)[0]["content"]}]}).encode()
        yield json.dumps({"prompt_embeds": image, "inputs": [{"content": [{"type": "text", "text": image}]}]}).encode()
    yield f'{{"input": "{SECRET}'.encode()
    yield f'{{"input": "{SECRET}\\ud800"}}'.encode()
    yield SECRET.encode()


def marked(answer: httpx.Response) -> bool:
    return SECRET in answer.text or SECRET in str(answer.headers)


@pytest.mark.slow
async def test_no_input_and_no_path_is_in_an_error_or_in_a_log(tmp_path, scripted_folder):
    flags = ("--engine", "process", "--access-log", "--served-model-name", "model", "--plugins", WHOLE_LOG)
    async with (
        scripted(tmp_path, scripted_folder, *flags) as server,
        client_of(server.url) as client,
    ):
        document = (await client.get("/openapi.json")).json()["paths"]
        paths = [path for path, methods in document.items() if "post" in methods and path != "/ping"]
        assert len(paths) > 20
        refused = 0
        # Each body at some of the paths, and each path with some of them.
        for path, body in list(product(paths, bodies()))[::9]:
            answer = await client.post(path, content=body)
            if answer.status_code >= 400:
                refused += 1
                assert not marked(answer), (path, body[:200], answer.text)
                assert str(tmp_path) not in answer.text
        assert refused > 200
        answer = await client.get("/none", params={SECRET: SECRET}, headers={"cookie": SECRET, SECRET: SECRET})
        assert (answer.status_code, marked(answer)) == (404, False)
        assert (
            await client.get(f"/{SECRET}")
        ).status_code == 404  # the client's own path, which only the log must not have
        # The script's error has the marker in its message.
        answer = await client.post("/v1/embeddings", json={"input": [script.RAISES]})
        assert (answer.status_code, marked(answer)) == (500, False)
        for shown in (await client.get("/v1/models"), await client.get("/info")):
            assert str(scripted_folder) not in shown.text
        server.signal()
        status, log = await server.wait_exit_and_log()
        assert status == 0
    assert "a batch of 1 rows failed" in log
    assert "ValueError" in log
    assert SECRET not in log
    assert "Traceback" not in log
    events = [json.loads(line) for line in log.splitlines()]
    requests = [event for event in events if event["message"] == "request"]
    assert len(requests) > refused
    assert {event["outcome"] for event in requests} == {"answered", "refused", "failed"}
    assert len({event["process"] for event in events}) == 2
