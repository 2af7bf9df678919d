"""Requests that hang or crash other servers, and what a correct server answers: the table of docs/what-hangs-others.md.

``python -m tests.end_to_end.hanging_requests`` writes the page.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from attrs import frozen

PAGE = Path(__file__).parents[2] / "docs" / "what-hangs-others.md"

HEAD = """# Requests that hang others

Ordinary requests that hang or crash another server, from the issues of those projects, and the response of this server.
The tests send each of them to servers with engines in the same process, in a process of their own, and behind two API
workers. After each, the next request is answered within a second, `/livez` responds, and nothing of the request is held
any longer. `python -m tests.end_to_end.hanging_requests` writes this page.

| issue | request | there | response here |
| --- | --- | --- | --- |
"""

MODEL_TOKENS = 256
"""The maximum of MiniLM, of which two are special tokens."""

SHORT, EXACT, TOO_LONG = "A nursery owns its tasks.", "the " * (MODEL_TOKENS - 2), "the " * (MODEL_TOKENS - 1)

NAN_WORD = "loop"
"""The model ``overflowing`` computes NaN for it."""

ONE, FIVE = "only-one", "only-five"
"""API keys that may have as many requests at a time."""


@frozen
class Asker:
    """Sends requests to a server with the models ``minilm``, ``qwen3``, ``clip``, ``raising`` and ``overflowing``."""

    client: httpx.Client

    def post(self, path: str, key: str | None = None, **body: Any) -> httpx.Response:
        """Send a request with a key that has no limits, or with ``key``."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self.client.post(path, json=body, headers=headers)

    def embed(self, texts: str | Sequence[Any], model: str = "minilm", **body: Any) -> httpx.Response:
        return self.post("/v1/embeddings", model=model, input=texts, **body)

    def at_once(self, count: int, ask: Callable[[], httpx.Response]) -> list[httpx.Response]:
        """Return the responses to requests that are sent at the same time."""
        with ThreadPoolExecutor(count) as threads:
            return [each.result() for each in [threads.submit(ask) for _ in range(count)]]


def vectors_of(answer: httpx.Response) -> list[list[float]]:
    """Return the vectors of a response, none of which is zero or has numbers that are not finite."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    found = body.get("embeddings") or [item["embedding"] for item in body["data"]]
    for vector in found:
        assert all(isinstance(number, float) and math.isfinite(number) for number in vector)
        assert any(vector)
    return found


def refused(answer: httpx.Response, status: int, said: str) -> None:
    """Check the status and the message of an error in any dialect."""
    error = answer.json()["error"]
    assert (answer.status_code, said in (error if isinstance(error, str) else error["message"])) == (status, True), (
        error
    )


@frozen
class HangingRequest:
    """A request: the issue that reports it, what it does there, and the response of a correct server."""

    issue: str
    request: str
    there: str
    answer: str
    check: Callable[[Asker], None]
    is_slow: bool = False

    @property
    def id(self) -> str:
        return self.issue.partition(",")[0]

    @property
    def row(self) -> str:
        return f"| {', '.join(map(linked, self.issue.split(', ')))} | {self.request} | {self.there} | {self.answer} |\n"


REPOSITORIES = {
    "vllm": "vllm-project/vllm",
    "TEI": "huggingface/text-embeddings-inference",
    "infinity": "michaelfeil/infinity",
    "ollama": "ollama/ollama",
}


def linked(issue: str) -> str:
    """Return an issue such as ``vllm#29496`` as a link."""
    project, _, number = issue.partition("#")
    return f"[{issue}](https://github.com/{REPOSITORIES[project]}/issues/{number})"


REQUESTS: list[HangingRequest] = []


def hangs(issue: str, request: str, there: str, answer: str, *, is_slow: bool = False) -> Callable[..., Any]:
    """Add a request, whose check is decorated."""

    def add(check: Callable[[Asker], None]) -> Callable[[Asker], None]:
        REQUESTS.append(HangingRequest(issue, request, there, answer, check, is_slow))
        return check

    return add


@hangs(
    "vllm#55427",
    "`input` with a short and a long text, `truncate_prompt_tokens`",
    "hangs; `/v1/models` still answers",
    "200, 2 vectors",
)
def one_of_two_is_truncated(server: Asker) -> None:
    assert len(vectors_of(server.embed([SHORT, TOO_LONG], truncate_prompt_tokens=-1))) == 2


@hangs("vllm#29496", "exactly as many tokens as the model takes", "hangs", "200")
def exactly_the_maximum(server: Asker) -> None:
    answer = server.embed(EXACT)
    assert len(vectors_of(answer)) == 1
    assert answer.json()["usage"]["prompt_tokens"] == MODEL_TOKENS


@hangs("vllm#42381", "one token more than the model takes", "deadlock", "400, which says both lengths")
def one_more_than_the_maximum(server: Asker) -> None:
    refused(server.embed(TOO_LONG), 400, "maximum context length is 256 tokens. However, an input has 257 tokens")


@hangs("vllm#25568", "6,000 inputs", "crash", "400, which says how many are accepted")
def thousands_of_inputs(server: Asker) -> None:
    refused(server.embed([SHORT] * 6000), 400, "6000 inputs are more than the 2048")


@hangs("vllm#48214", "nine texts of 32,766 times the same digit", "crash", "400; with truncation 200, 9 vectors")
def long_runs_of_digits(server: Asker) -> None:
    texts = [str(digit) * 32_766 for digit in range(1, 10)]
    # A word of so many letters is one unknown token of MiniLM's vocabulary, so nothing is too long.
    assert len(vectors_of(server.embed([" ".join(text) for text in texts], truncate_prompt_tokens=-1))) == 9
    refused(server.embed([" ".join(text) for text in texts]), 400, "maximum context length is 256 tokens")
    assert len(vectors_of(server.embed(texts))) == 9


@hangs("vllm#44793", "`messages`, which the model's chat template refuses", "all of `/v1` hangs", "400")
def a_template_that_raises(server: Asker) -> None:
    messages = [{"role": "user", "content": SHORT}]
    refused(server.post("/v1/embeddings", model="raising", messages=messages), 400, "never like that")


@hangs(
    "vllm#52163",
    "a `chat_template` of three loops over `range(999)`, with `--trust-request-chat-template`",
    "a worker computes without end",
    "400 after 5 seconds",
    is_slow=True,
)
def a_template_without_end(server: Asker) -> None:
    loops = "".join(f"{{% for {name} in range(999) %}}" for name in "abc") + "{% endfor %}" * 3
    messages = [{"role": "user", "content": SHORT}]
    refused(
        server.post("/v1/embeddings", model="raising", messages=messages, chat_template=loops), 400, "chat template"
    )


@hangs(
    "infinity#367, infinity#609", "an image of one pixel; a broken image", "hangs; `/health` still answers", "200; 422"
)
def small_and_broken_images(server: Asker) -> None:
    pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
    assert len(vectors_of(server.embed([f"data:image/png;base64,{pixel}"], "clip", modality="image"))) == 1
    for broken in (pixel[:40], "AAAA"):
        refused(server.embed([f"data:image/png;base64,{broken}"], "clip", modality="image"), 422, "image")


@hangs("TEI#424", "`/health`, eight times while a long batch is computed", "panic", "200")
def probes_during_a_long_batch(server: Asker) -> None:
    with ThreadPoolExecutor(9) as threads:
        long = threads.submit(server.embed, [EXACT] * 64)
        probes = [threads.submit(server.client.get, "/health") for _ in range(8)]
        assert [each.result().status_code for each in probes] == [200] * 8
        assert len(vectors_of(long.result())) == 64


@hangs("TEI#470", "8,000 inputs to `/embed`", "panic", "422, which says how many are accepted")
def thousands_of_inputs_to_tei_s_route(server: Asker) -> None:
    refused(server.post("/embed", inputs=["hello"] * 8000), 422, "8000 inputs are more than the 2048")


@hangs("TEI#744", "four at a time, of which the server accepts one", "panic", "200 or 429")
def more_at_a_time_than_one(server: Asker) -> None:
    answers = server.at_once(4, lambda: server.post("/embed", key=ONE, inputs=[SHORT] * 8))
    assert {answer.status_code for answer in answers} <= {200, 429}
    assert server.post("/embed", key=ONE, inputs=SHORT).status_code == 200


@hangs(
    "TEI#811", "25 at a time to `/embed` with five inputs each, of which the server accepts five", "panic", "200 or 429"
)
def more_at_a_time_than_five(server: Asker) -> None:
    answers = server.at_once(25, lambda: server.post("/embed", key=FIVE, inputs=[SHORT] * 5))
    assert {answer.status_code for answer in answers} <= {200, 429}
    assert [len(answer.json()) for answer in answers if answer.status_code == 200] != []
    assert server.post("/embed", key=FIVE, inputs=SHORT).status_code == 200


@hangs("TEI#694", "an input longer than `--max-batch-tokens`", "endless loop", "200")
def longer_than_a_batch(server: Asker) -> None:
    assert len(vectors_of(server.embed([EXACT, EXACT]))) == 2


@hangs("TEI#235", "a million dots to `/tokenize`, 20 at a time", "takes all CPU and memory", "422 at once")
def a_million_dots(server: Asker) -> None:
    for answer in server.at_once(20, lambda: server.post("/tokenize", inputs="." * 1_000_000)):
        refused(answer, 422, "more than the 200000")


@hangs("TEI#644", "any input to a Qwen3 model", "200 with `null` for numbers", "200 with numbers")
def numbers_from_qwen3(server: Asker) -> None:
    assert len(vectors_of(server.embed([SHORT, "", "hello " * 5], "qwen3"))) == 3


@hangs(
    "ollama#14657",
    "three texts, for one of which the model computes NaN",
    "500 without a reason, for the whole batch",
    "500, which names the input; requests of others in the same batch are 200",
)
def one_output_that_is_not_finite(server: Asker) -> None:
    bad = ["hello", f"a {NAN_WORD}", "bread"]
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(server.embed, texts, "overflowing") for texts in (bad, "hello", bad, ["bread"] * 8)]
        wrong, good, wrong_too, more = [answer.result() for answer in answers]
    for answer in (wrong, wrong_too):
        refused(answer, 500, "input 1 that are not finite")
    assert [len(vectors_of(answer)) for answer in (good, more)] == [1, 8]
    refused(server.post("/api/embed", model="overflowing", input=bad), 500, "input 1 that are not finite")


@hangs("ollama#17878", "100 texts of 60 tokens to `/api/embed`", "the later vectors are 0", "200, each as by itself")
def many_tokens_in_one_request(server: Asker) -> None:
    texts = [" ".join(f"{word}{number}" for word in ("one", "two", "six", "ten") * 5) for number in range(100)]
    answer = server.post("/api/embed", model="minilm", input=texts)
    vectors = vectors_of(answer)
    assert answer.json()["prompt_eval_count"] > 4700
    for index in (0, 57, 99):
        [alone] = vectors_of(server.post("/api/embed", model="minilm", input=texts[index]))
        assert math.isclose(sum(map(lambda a, b: a * b, alone, vectors[index])), 1, abs_tol=1e-4)


@hangs("ollama#3944", "a prompt of blanks to `/api/embeddings`", "hangs", "200")
def blanks(server: Asker) -> None:
    for prompt in (" ", "\n\t ", "\u200b"):
        answer = server.post("/api/embeddings", model="minilm", prompt=prompt)
        assert (answer.status_code, len(answer.json()["embedding"])) == (200, 384)


@hangs("vllm#25991", "many requests at a time", "the engine dies", "200, each with its own vectors")
def many_at_a_time(server: Asker) -> None:
    counts = [1, 7, 2, 16, 3, 1, 5, 11]
    with ThreadPoolExecutor(len(counts)) as threads:
        answers = [threads.submit(server.embed, [SHORT] * count) for count in counts]
        assert [len(vectors_of(answer.result())) for answer in answers] == counts


@hangs("vllm#7502", "a task that the model cannot do", "the server stalls", "400, which names what it can do")
def another_task(server: Asker) -> None:
    answer = server.post("/classify", model="minilm", input=SHORT)
    refused(answer, 400, "Supported tasks: ['embed'")


def page() -> str:
    """Return the page as Markdown."""
    return HEAD + "".join(request.row for request in rows())


def rows() -> Iterator[HangingRequest]:
    """Yield the requests, and the one whose forward pass raises, which needs a model that does so."""
    yield from REQUESTS
    yield HangingRequest(
        "infinity#242",
        "an input whose forward pass raises",
        "no request is answered any more; `/health` still is",
        "500, without what the model raised; the next request is 200",
        lambda _: None,
    )


if __name__ == "__main__":
    PAGE.write_text(page())
