"""``trio_pool_serve.asgi`` over a scripted runner."""

from tests.server.programs.script import load_scripted
from trio_pool_serve.processes.large_imports import forbid_torch

forbid_torch()  # nothing here computes, and to import it takes two seconds

from trio_pool_serve.asgi import app  # noqa: E402

app.service.load_runner = load_scripted
