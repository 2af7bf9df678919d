"""What ``deploy/`` is rendered to, by the tools that ``scripts/test`` puts into an environment of their own."""

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.server_process import ROOT

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "trio-pool-serve"
TOOLS = ROOT / ".venv-deploy" / "bin"
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()

needs_tools = pytest.mark.skipif(
    not (TOOLS / "helm").exists(), reason="scripts/test installs helm and the validators, on x86-64"
)

VARIANTS = ("base", "cpu", "autoscaled")
"""The chart as it is, and with each of its files of values."""

CUSTOM_RESOURCES = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}
Manifest = dict[str, Any]


def run_tool(name: str, *arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a tool; its caches and settings are nobody's, and it reaches no cluster."""
    environment = {"HOME": "/nonexistent", "KUBECONFIG": "/nonexistent", "PATH": f"{TOOLS}:/usr/bin:/bin"}
    command = [str(TOOLS / name), *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, cwd=ROOT, input=given, timeout=120
    )


def manifests_of(ran: subprocess.CompletedProcess[str]) -> list[Manifest]:
    assert ran.returncode == 0, ran.stderr
    return [manifest for manifest in yaml.safe_load_all(ran.stdout) if manifest]


@cache
def templated(*arguments: str, release: str = "trio-pool-serve", namespace: str = "trio-pool-serve") -> list[Manifest]:
    return manifests_of(run_tool("helm", "template", release, str(CHART), "--namespace", namespace, *arguments))


def values_of(variant: str) -> list[str]:
    return [] if variant == "base" else ["--values", str(CHART / f"values-{variant}.yaml")]


def rendered(variant: str) -> list[Manifest]:
    """A variant of the chart, or ``models``, the manifest of the page."""
    return templated(*values_of(variant)) if variant != "models" else models_of_the_page()


def models_of_the_page() -> list[Manifest]:
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, flags=re.M | re.S)
    return list(yaml.safe_load_all(block))


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    named = {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in manifests}
    assert len(named) == len(manifests), "a name is there twice"
    return named


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def write(manifests: list[Manifest], path: Path) -> Path:
    path.write_text(yaml.safe_dump_all(manifests))
    return path
