"""The register of cases: how each item of the record is shown."""

from collections.abc import Callable

from attrs import frozen

from tests.compatibility.tei_record import Seen

Case = Callable[..., Seen]

CASES: dict[tuple[str, str], Case] = {}


@frozen
class Subject:
    """A route, the kind of model that it is for, and a body that it accepts."""

    route: str
    kind: str
    body: dict[str, object]

    @property
    def path(self) -> str:
        return self.route.partition(" ")[2]


SUBJECTS = {
    subject.route: subject
    for subject in (
        Subject("POST /embed", "embedding", {"inputs": ["a nursery", "bread"]}),
        Subject("POST /embed_all", "embedding", {"inputs": ["a nursery", "bread"]}),
        Subject("POST /embed_sparse", "splade", {"inputs": ["a nursery", "bread"]}),
        Subject("POST /predict", "classifier", {"inputs": "a nursery"}),
        Subject("POST /rerank", "reranker", {"query": "who owns", "texts": ["a nursery", "bread"]}),
        Subject(
            "POST /similarity",
            "embedding",
            {"inputs": {"source_sentence": "a nursery", "sentences": ["bread", "owns"]}},
        ),
        Subject("POST /tokenize", "embedding", {"inputs": ["a nursery", "bread"]}),
        Subject("POST /decode", "embedding", {"ids": [[5, 6], [7]]}),
        Subject("POST /v1/embeddings", "embedding", {"input": ["a nursery", "bread"]}),
    )
}


def case(names: str, *routes: str) -> Callable[[Case], Case]:
    """Register a function as the case of items: names, separated by blanks, on each of the routes.

    It is called with the servers and the route. It asserts that the item does what TEI documents, and returns what
    it has seen besides.
    """

    def register(function: Case) -> Case:
        for route in routes:
            for name in names.split():
                assert (route, name) not in CASES, f"two cases for {name} of {route}"
                CASES[route, name] = function
        return function

    return register
