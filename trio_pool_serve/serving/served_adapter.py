"""The LoRA adapters of a served model: names in the API for the model with the adapter added to its weights."""

import time
from functools import partial

from attrs import define, field
from msgspec.structs import replace

from trio_pool_serve.config.model_sources import HUB_ID
from trio_pool_serve.engine.engine import Engine
from trio_pool_serve.engine.queue_entry import require_finite
from trio_pool_serve.errors import BatchFailedError, ModelLoadError, NotFiniteError
from trio_pool_serve.models.files.adapter_files import read_adapter
from trio_pool_serve.models.folder import locate_folder
from trio_pool_serve.threads.offload import Offload
from trio_pool_serve.types import Adapter


@define(eq=False)
class ServedAdapter:
    """An adapter of a model, which requests select by its ``name``; ``location`` is a local folder or a hub id."""

    name: str
    location: str
    adapter: Adapter | None = None
    """``None`` until its files have been read and a row has been computed with it."""
    created: float = field(init=False, factory=time.time)
    last_used: float | None = field(init=False, default=None)
    """Time of the last use; like ``created`` in seconds since the epoch."""

    @property
    def shown_location(self) -> str:
        """The id on the hub, or the name of one in a local folder, whose path clients must not see."""
        return self.location if HUB_ID.fullmatch(self.location) else self.name

    async def check(self, engine: Engine, offload: Offload) -> None:
        """Read its files, and compute a short row with it, if the model has one. The engine must be ready.

        Raises ``ModelLoadError`` if it cannot be applied to the model, and as ``Engine.submit``. Cancellation: at once;
        a thread that reads goes on.
        """
        folder = await offload.run("download", partial(locate_folder, self.location), abandon_on_cancel=True)
        files = await offload.run("download", partial(read_adapter, folder), abandon_on_cancel=True)
        adapter = Adapter(str(folder.absolute()), files.digest)
        if (request := engine.facts.probe_request) is not None:
            try:
                await engine.submit_all([replace(request, adapter=adapter)], require_finite)
            except (BatchFailedError, NotFiniteError) as error:
                raise ModelLoadError(str(error)) from error
        self.adapter = adapter
