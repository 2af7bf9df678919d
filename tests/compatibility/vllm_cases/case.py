"""One request that both servers are sent."""

from collections.abc import Mapping
from typing import Any

from attrs import Factory, frozen

SENTENCE = "A nursery owns its tasks."
OTHER = "The device computes the next batch."
LONG_TEXT = "Every task has a parent. " * 40
"""Longer than any of the encoders reads."""
USER = {"role": "user", "content": SENTENCE}
ASSISTANT = {"role": "assistant", "content": "Yes"}
DOCUMENTS = [SENTENCE, OTHER, "Yes"]
RERANK = {"query": SENTENCE, "documents": DOCUMENTS}
SCORE = {"text_1": SENTENCE, "text_2": DOCUMENTS}


NO_DOCUMENTS = "Cohere's results contain no documents; `return_documents: true` adds them"
DOCUMENTS_OF_RESULTS = tuple(f"results.{index}.document" for index in range(len(DOCUMENTS)))


@frozen(kw_only=True)
class Case:
    """A request, and how this server's answer may differ from vLLM's."""

    name: str
    """What is special about the request, as Markdown."""
    kinds: tuple[str, ...]
    """The kinds of model that are sent it; the names are those of ``vllm_folders``."""
    path: str
    method: str = "POST"
    body: Any = None
    """Sent as JSON; bytes are sent as they are."""
    headers: Mapping[str, str] = Factory(dict)
    says: tuple[str, ...] = ()
    """What both servers' error messages contain."""
    reason: str = ""
    """Why this server's answer differs; empty if it must not."""
    status: int | None = None
    """This server's status where it is not vLLM's."""
    differs: tuple[str, ...] = ()
    """The fields of a good answer that may differ, as ``usage.prompt_tokens``."""

    def __attrs_post_init__(self) -> None:
        assert bool(self.reason) == (self.status is not None or bool(self.differs)), self.name


def post(name: str, path: str, kinds: str | tuple[str, ...], body: Any, **more: Any) -> Case:
    """Return the case of a request with a JSON body."""
    return Case(name=name, path=path, kinds=(kinds,) if isinstance(kinds, str) else kinds, body=body, **more)


def post_fields(name: str, path: str, kinds: str | tuple[str, ...], **fields: Any) -> Case:
    """Return the case of a request with these fields, among which those of ``Case`` may be."""
    more = {field: fields.pop(field) for field in ("says", "reason", "status", "differs", "headers") if field in fields}
    return post(name, path, kinds, fields, **more)


def embed(name: str, kinds: str | tuple[str, ...] = "embedding", **fields: Any) -> Case:
    """Return the case of an embedding with these fields, by default of a text."""
    return post_fields(name, "/v1/embeddings", kinds, **{"input": SENTENCE, **fields})


def get(path: str, kinds: str | tuple[str, ...], *, name: str = "", **more: Any) -> Case:
    """Return the case of a request without a body."""
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    return Case(name=name, path=path, kinds=kinds, **{"method": "GET", **more})


def rerank(name: str, kinds: str | tuple[str, ...], *, path: str = "/rerank", **fields: Any) -> Case:
    """Return the case of a ranking with these fields besides a query and three documents."""
    return post_fields(name, path, kinds, **{**RERANK, **fields})


def score(name: str, kinds: str | tuple[str, ...], *, path: str = "/score", **fields: Any) -> Case:
    """Return the case of a score with these fields besides a text and three others."""
    return post_fields(name, path, kinds, **{**SCORE, **fields})
