"""Prints pip's package sources as variables for uv, which does not read pip's configuration: ``package_sources.py``.

``NAME=VALUE``, each ended by NUL, as ``env --split`` could not read: values may have secrets and are never shown. Exits
with status 1, and says why, if pip is configured in a way that cannot be told to uv. ``--torch``: prints nothing, and
exits with status 0 if PyTorch's own package index can be reached.
"""

import ast
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterable

TORCH_INDEX = "https://download.pytorch.org/whl/cpu/"
TORCH_TIMEOUT_S = 2.5

WITHOUT_EFFECT = frozenset(
    {
        "break-system-packages",
        "build-constraint",
        "cache-dir",
        "config-file",
        "constraint",
        "default-retries",
        "disable-pip-version-check",
        "log",
        "no-cache-dir",
        "no-color",
        "no-input",
        "no-python-version-warning",
        "no-warn-script-location",
        "progress-bar",
        "quiet",
        "require-virtualenv",
        "retries",
        "root-user-action",
        "use-feature",
        "verbose",
    }
)
"""Settings of pip that do not say where packages come from. Constraints are set for each call."""


def merged(settings: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return pip's settings for ``pip install`` by name: environment before ``[install]`` before ``[global]``."""
    by_section: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for key, value in settings:
        section, _, name = key.partition(".")
        if section in by_section:
            by_section[section][name.lower().replace("_", "-")] = value
    return {**by_section["global"], **by_section["install"], **by_section[":env:"]}


def uv_variables(pip: dict[str, str]) -> dict[str, str]:
    """Return uv's variables for pip's settings. Raises ``ValueError`` for a setting that uv has no equal of."""
    # pip takes the best version of all its sources, uv by default those of the first that has the package.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, value in pip.items():
        if not value:
            continue
        match name:
            case "index-url":
                variables["UV_DEFAULT_INDEX"] = value
            case "extra-index-url":
                variables["UV_INDEX"] = " ".join(value.split())
            case "find-links":
                variables["UV_FIND_LINKS"] = ",".join(value.split())
            case "cert":
                variables["SSL_CERT_FILE"] = value
            case "client-cert":
                variables["SSL_CLIENT_CERT"] = value
            case "trusted-host":
                variables["UV_INSECURE_HOST"] = " ".join(value.split())
            case "proxy":
                variables["HTTPS_PROXY"] = variables["HTTP_PROXY"] = value
            case "timeout" | "default-timeout":
                variables["UV_HTTP_TIMEOUT"] = str(round(float(value)))
            case _ if name not in WITHOUT_EFFECT:
                raise ValueError(name)
    return variables


def pip_settings() -> list[tuple[str, str]]:
    """Return what ``pip config list`` says, of files and variables alike."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True)
    pairs = (line.partition("=") for line in listed.stdout.splitlines() if "=" in line)
    return [(key, _text_of(value)) for key, _, value in pairs]


def _text_of(value: str) -> str:
    found = ast.literal_eval(value)
    return "\n".join(found) if isinstance(found, list) else str(found)


def reaches_torch_index() -> bool:
    """Return whether PyTorch's package index answers. Blocks for ``TORCH_TIMEOUT_S``, and for as long as names take."""
    request = urllib.request.Request(TORCH_INDEX, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=TORCH_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    if sys.argv[1:] == ["--torch"]:
        sys.exit(0 if reaches_torch_index() else 1)
    try:
        variables = uv_variables(merged(pip_settings()))
    except ValueError as error:
        sys.exit(f"pip's setting {error} has no equal for uv")
    for name, value in variables.items():
        if name not in os.environ:  # the user's own
            sys.stdout.write(f"{name}={value}\0")
