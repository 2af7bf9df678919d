"""Models of every kind, loaded onto the simulated device as the server loads them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
import torch
from attrs import frozen

from tests.models.classifier_families import write_classifier
from tests.models.model_families import FAMILIES, ServedModel, write_family
from tests.models.retrieval_families import colbert_v2, csr, splade_max, splade_sum, write_bge_m3
from tests.models.test_reranking_agreement import FLAT, write_process_reward, write_reranker
from tests.models.vision_families import (
    CONTENTS,
    DUAL_ENCODERS,
    PAGE_RETRIEVERS,
    PICTURES,
    SENTENCES,
    VISION_LANGUAGE,
    SeeingModel,
)
from tests.simgpu.device import simulated_device
from trio_pool_serve.models.loading import torch_loading
from trio_pool_serve.prompts import PairPrompt
from trio_pool_serve.types import Classify, Embed, PoolingParams, PoolingRequest, SparseEmbed, TokenClassify, TokenEmbed

Way: TypeAlias = Literal["padded", "packed", "graphed"]

WAYS: Mapping[Way, Mapping[str, Any]] = {
    "padded": {"backend": "torch"},
    "packed": {"backend": "auto", "graphs": False},
    "graphed": {"backend": "auto"},
}
"""Settings of a model that is computed in one of the ways; a kind that cannot be packed is padded in all of them."""

BATCH_TOKENS = 256
"""Of the largest batches; those of the server would take minutes to compute on a CPU."""

TEXTS = (
    "An event loop that is blocked answers no request.",
    "Yes",
    "A nursery owns its tasks, every wait can be cancelled, and every failure has somewhere to go.",
)


@frozen(eq=False)
class Kind:
    """A kind of model: how to write one, and what is computed of it. ``sees``: its inputs may be images, too."""

    name: str
    write: Callable[[Path], Path]
    params: tuple[PoolingParams, ...]
    sees: bool = False
    scores_pairs: bool = False

    async def requests(self, served: ServedModel) -> list[PoolingRequest]:
        """Return the rows of a batch of mixed lengths; where it can be, also those of two stages."""
        if isinstance(served, SeeingModel):
            if self.name in VISION_LANGUAGE:
                return [PoolingRequest(served.in_conversation(content), self.params) for content in CONTENTS]
            items = [*SENTENCES[:2], *PICTURES[:3], SENTENCES[2]]
            return await served.requests(items, [self.params] * len(items))
        if self.scores_pairs:
            return await served.requests([PairPrompt(TEXTS[0], text) for text in TEXTS], [self.params] * len(TEXTS))
        return [
            *await served.ask(TEXTS, [self.params] * len(TEXTS), "document"),
            *await served.ask(TEXTS[:2], [self.params] * 2, "query"),
        ]

    def serve(self, path: Path, *, fits: bool = True, **settings: Any) -> ServedModel:
        """Load a folder, and find the budget of batches that fit."""
        model = SeeingModel if self.sees else ServedModel
        served = model(path, dtype=settings.pop("dtype", "bfloat16"), settings=settings)
        if fits:
            served.runner = served.runner.fitted(BATCH_TOKENS)
        return served


def classifier(name: str, **config: Any) -> Callable[[Path], Path]:
    return partial(write_classifier, name=name, **config)


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        *(Kind(name, partial(write_family, name=name), (Embed(), TokenEmbed())) for name in FAMILIES),
        *(
            Kind(f"cross-encoder {name}", classifier(name, num_labels=1), (Classify("score"),), scores_pairs=True)
            for name in ("bert", "distilbert", "modernbert", "deberta-v2", "qwen3")
        ),
        Kind("classifier roberta", classifier("roberta", num_labels=3), (Classify(), TokenClassify("raw"))),
        Kind("token classifier bert", classifier("bert", head="TokenClassification", num_labels=4), (TokenClassify(),)),
        Kind("reranker qwen3", partial(write_reranker, template=FLAT), (Classify("score"),), scores_pairs=True),
        Kind("process reward model", write_process_reward, (TokenClassify(),)),
        Kind("splade max", splade_max, (SparseEmbed(),)),
        Kind("splade sum", splade_sum, (SparseEmbed(),)),
        Kind("csr", csr, (SparseEmbed(60),)),
        Kind("bge-m3", write_bge_m3, (Embed(), SparseEmbed(), TokenEmbed())),
        Kind("colbert", colbert_v2, (TokenEmbed(),)),
        *(Kind(name, DUAL_ENCODERS[name], (Embed(),), sees=True) for name in ("clip", "siglip", "siglip2_naflex")),
        *(
            Kind(name, write, (Embed(), TokenEmbed()), sees=True)
            for name, write in VISION_LANGUAGE.items()
            if name != "qwen2_vl_of_old"
        ),
        *(Kind(name, PAGE_RETRIEVERS[name], (TokenEmbed(),), sees=True) for name in ("colqwen2", "colpali")),
    )
}


@contextmanager
def on_simulated_device(**device: Any) -> Iterator[torch.device]:
    """Have models loaded onto the simulated device within the block."""
    with simulated_device(**device) as found, pytest.MonkeyPatch.context() as patch:
        # The setting names a kind of device that this torch has not; its number counts.
        patch.setattr(
            torch_loading, "resolve_device", lambda name: torch.device(found.type, int(name.partition(":")[2] or 0))
        )
        yield found
