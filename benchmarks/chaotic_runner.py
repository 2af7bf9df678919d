"""A real runner that fails as devices do: for batches with marked rows, and at random."""

import os
import random
import time

from attrs import define, field

from trio_pool_serve.config import ModelConfig
from trio_pool_serve.models.loading.runner_loader import load_transformer
from trio_pool_serve.models.model_kind import AnyModelFolder
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Batch, PooledBatch, Prepare, Runner, RunnerFacts

RAISES, OUT_OF_MEMORY, WEDGES = 97, 98, 99
"""Token ids that mark a row, as its second: a batch with one fails or is held up. BERT leaves them unused."""

WEDGE_S = 0.5

OUT_OF_MEMORY_SHARE = 0.02
"""Share of the batches of several rows: fewer rows need less memory, and a single row always succeeds."""

SEED = "CHAOS_SEED"


@define(eq=False)
class ChaoticRunner:
    """Computes what ``runner`` does, if at all."""

    runner: Runner
    choose: random.Random = field(factory=lambda: random.Random(os.environ.get(SEED, "0")))

    def launch(self, batch: Batch) -> PooledBatch:
        """Start the forward pass, or raise ``ValueError`` or ``MemoryError``."""
        marks = {int(request.prompt.token_ids[1]) for request in batch.requests if request.tokens > 1}
        if WEDGES in marks:
            time.sleep(WEDGE_S)
        if RAISES in marks:
            raise ValueError("a marked row")
        unlucky = len(batch.requests) > 1 and self.choose.random() < OUT_OF_MEMORY_SHARE
        if unlucky or OUT_OF_MEMORY in marks:
            raise MemoryError("simulated")
        return self.runner.launch(batch)

    @property
    def facts(self) -> RunnerFacts:
        """The facts of ``runner``."""
        return self.runner.facts

    def return_memory(self) -> None:
        """Free memory as ``runner`` does."""
        self.runner.return_memory()


def load_chaotic(folder: AnyModelFolder, config: ModelConfig, offload: Offload) -> Prepare:
    """Load the runner of a folder, to fail; engine processes import this by its name."""
    prepare = load_transformer(folder, config, offload)
    return lambda params: ChaoticRunner(prepare(params))
