"""Embedding models with a Router, or Asym: queries and documents have transformers or tables of their own.

Each route, with the modules after the Router, is read and loaded as a model of its own: a transformer or a static
embedding. Routes are numbered, routes with a transformer first.
"""

from typing import get_args

from attrs import frozen

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.errors import ModelLoadError, require
from trio_pool_serve.models.embedding import similarity_of
from trio_pool_serve.models.files.folder_files import STATIC_MODULE, TRANSFORMERS, FolderFiles, files_of_route
from trio_pool_serve.models.model_kind import ModelKind, ModelSpec
from trio_pool_serve.models.sparse import SPARSE_MODULES
from trio_pool_serve.prompts import InputType


@frozen(kw_only=True)
class Routed(ModelSpec):
    """One vector per text, computed by the route of its input type."""

    tasks = frozenset({"embed", "score"})
    scoring = "vectors"
    supports_messages = False

    @property
    def pooling(self) -> str:
        """The name for a pooling type of each route's own."""
        return "router"

    @property
    def normalizes(self) -> bool:
        """Whether the last module of each route, or after the Router, is a Normalize."""
        return all(files.modules[-1].name == "Normalize" for files in self.route_files)


def read_routed(files: FolderFiles, config: ModelConfig) -> Routed | None:  # noqa: ARG001
    """Read dense models that begin with a Router. Raises ``ModelLoadError`` for routes that cannot be served."""
    if (
        (router := files.router) is None
        or files.encoder_class == "SparseEncoder"
        or any(module.name in SPARSE_MODULES for route in router.routes.values() for module in route)
    ):
        return None
    for name, route in router.routes.items():
        require(
            bool(route) and route[0].name in (*TRANSFORMERS, STATIC_MODULE),
            f"The route {name} of the Router begins with neither a Transformer nor a {STATIC_MODULE}.",
        )
    of_types = {input_type: router.route_of(input_type) for input_type in (None, *get_args(InputType))}
    if unused := router.routes.keys() - of_types.values():
        raise ModelLoadError(
            f"The route {', '.join(sorted(unused))} of the Router is for neither queries, documents nor other texts."
        )
    names = sorted(router.routes, key=lambda name: router.routes[name][0].name == STATIC_MODULE)
    return Routed(
        similarity=similarity_of(files),
        route_files=tuple(files_of_route(files, router.routes[name]) for name in names),
        route_numbers={key: names.index(name) for key, name in of_types.items() if name is not None},
    )


ROUTED = ModelKind(read=read_routed, open_runner="trio_pool_serve.models.routed.loading:open_routed")
