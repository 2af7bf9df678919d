"""``python -m trio_pool_serve`` is the ``trio-pool-serve`` command."""

from trio_pool_serve.cli import main

main()
