"""Programs of Debian's packages that tests run: a browser, proxies, Prometheus. `scripts/test` installs them."""

import os
import shutil

import pytest


def debian_program(name: str) -> str:
    """Return the path of an installed program; skip the test where there is none, except in CI."""
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail(f"{name} is not installed, though scripts/test installs it")
        pytest.skip(f"{name} is not installed")
    return path
