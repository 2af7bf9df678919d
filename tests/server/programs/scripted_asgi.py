"""``trio_pool_serve.asgi`` over a scripted runner."""

from tests.server.programs.script import load_scripted
from trio_pool_serve.asgi import app

app.service.load_runner = load_scripted
