"""Cases of ``/tokenize`` and ``/decode``."""

from typing import Any

from tests.compatibility.tei_cases import case
from tests.compatibility.tei_record import SAME, Seen
from tests.compatibility.tei_servers import PROMPT, Servers

TOKENIZE, DECODE = "POST /tokenize", "POST /decode"
TEXTS = ["who owns a task", "bread"]


def ids_of(tokens: list[dict[str, Any]]) -> list[int]:
    return [token["id"] for token in tokens]


def tokenize(servers: Servers, **body: Any) -> list[list[dict[str, Any]]]:
    return servers.ask("embedding", "/tokenize", **body)


@case("inputs", TOKENIZE)
def tokens_of_texts(servers: Servers, route: str) -> Seen:
    oracle = servers.oracle("embedding")
    texts = [*TEXTS, "ü bread"]
    for inputs, expected in ((texts, texts), (TEXTS[0], TEXTS[:1])):
        found = tokenize(servers, inputs=inputs)
        assert [*map(ids_of, found)] == [*map(oracle.ids, expected)]
        for tokens, text in zip(found, expected, strict=True):
            for token in tokens:
                at = (token["start"], token["stop"])
                if token["special"]:
                    assert at == (None, None)
                else:  # they count bytes
                    assert text.encode()[slice(*at)].decode() == token["text"]
    return SAME


@case("add_special_tokens", TOKENIZE)
def tokens_without_the_model_s_own(servers: Servers, route: str) -> Seen:
    whole = servers.oracle("embedding").ids(TEXTS[0])
    assert ids_of(tokenize(servers, inputs=TEXTS[0], add_special_tokens=True)[0]) == whole
    assert ids_of(tokenize(servers, inputs=TEXTS[0], add_special_tokens=False)[0]) == whole[1:-1]
    return SAME


@case("prompt_name", TOKENIZE)
def tokens_with_a_prompt(servers: Servers, route: str) -> Seen:
    (tokens,) = tokenize(servers, inputs="bread", prompt_name="query")
    assert ids_of(tokens) == servers.oracle("embedding").ids(f"{PROMPT}bread")
    assert tokens[-2]["stop"] == len(f"{PROMPT}bread")
    assert servers.post("embedding", "/tokenize", {"inputs": "bread", "prompt_name": "poem"}).status_code == 422
    return SAME


@case("ids", DECODE)
def texts_of_tokens(servers: Servers, route: str) -> Seen:
    oracle = servers.oracle("embedding")
    tokenizer = oracle.tokenizers["Right"]
    ids = [*map(oracle.ids, TEXTS)]
    expected = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    assert servers.ask("embedding", "/decode", ids=ids) == expected
    assert servers.ask("embedding", "/decode", ids=ids[0]) == expected[:1]
    return SAME


@case("skip_special_tokens", DECODE)
def texts_with_special_tokens(servers: Servers, route: str) -> Seen:
    oracle = servers.oracle("embedding")
    for skipped in (True, False):
        expected = oracle.tokenizers["Right"].decode(oracle.ids("bread"), skip_special_tokens=skipped)
        assert servers.ask("embedding", "/decode", ids=oracle.ids("bread"), skip_special_tokens=skipped) == [expected]
    return SAME
