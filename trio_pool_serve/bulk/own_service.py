"""The server's service in the process of a command, with one model and without HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from trio_pool_serve.bulk.bulk_options import OwnModelOptions
from trio_pool_serve.config import (
    BatchConfig,
    Config,
    LoggingConfig,
    ProcessesConfig,
    SchedulingConfig,
)
from trio_pool_serve.engine.placement import has_gpu
from trio_pool_serve.models.files.model_digest import digest_of
from trio_pool_serve.process_setup import open_service
from trio_pool_serve.service import Service
from trio_pool_serve.threads.scheduling import NICENESS


@asynccontextmanager
async def open_own_service(location: str, options: OwnModelOptions) -> AsyncIterator[Service]:
    """Load a model as a command's options say, and have it compute for as long as the block lasts.

    Raises and is cancelled as ``open_service``.
    """
    tokens, on_gpu = options.max_batch_tokens, has_gpu(options.loading)
    config = Config(
        models=(location,),
        loading=options.loading,
        scheduling=SchedulingConfig() if tokens is None else SchedulingConfig(max_batch_tokens=tokens),
        # In this process, where there are no other requests whose event loop computing could slow down.
        processes=ProcessesConfig(engine=None if on_gpu else "local", replicas=options.replicas),
        logging=LoggingConfig(log_level="warning"),
        batch=BatchConfig(data_dir=""),  # a server's data folder is not for this process
    )
    async with open_service(config, NICENESS if on_gpu else 0) as service:
        yield service


async def identity_of(service: Service, location: str, sample: str) -> dict[str, str]:
    """Return what a journal keeps of the model, with a digest of what that computes from a sample.

    Cancellation: as soon as the model's files have been read.
    """
    model = service.model()
    digest = await service.offload.run("files", partial(digest_of, model.folder.path, service.config.loading))
    return {
        "--model": location,
        "the maximum of tokens in a text": str(model.renderer.max_model_len),
        "the maximum of tokens in a batch": str(model.engine.facts.max_batch_tokens),
        "the digest of the model's settings and weights": " ".join(digest),
        "the digest of what the model computes from a sample": sample,
    }
