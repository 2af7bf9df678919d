"""Helm renders the chart, and Kubernetes and its operators would accept what it renders."""

import json
import re

import pytest
import yaml

from tests.deploy.manifests import (
    CHART,
    CUSTOM_RESOURCES,
    DEPLOY,
    PAGE,
    VARIANTS,
    Manifest,
    by_name,
    needs_tools,
    of_kind,
    rendered,
    run_tool,
    templated,
    values_of,
    write,
)
from tests.server.server_process import ROOT

pytestmark = needs_tools
CHECK_CUSTOM = str(ROOT / "tests" / "deploy" / "programs" / "check_custom_resources.py")
OLDEST, NEWEST = "1.30", "1.37"
"""The oldest Kubernetes that the chart accepts, and the newest whose schemas the validator has."""


def with_all_values() -> list[Manifest]:
    values = str(ROOT / "tests" / "deploy" / "all-values.yaml")
    return templated("--values", values, release="other", namespace="elsewhere")


def test_every_file_of_values_is_rendered_for_the_oldest_kubernetes_that_is_checked():
    assert {path.stem for path in CHART.glob("values*.yaml")} == {"values", "values-cpu", "values-autoscaled"}
    assert f'kubeVersion: ">={OLDEST}.0-0"' in (CHART / "Chart.yaml").read_text()


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("variant", [*VARIANTS, "models", "all values"])
def test_kubernetes_accepts_every_object(variant, version, tmp_path):
    manifests = with_all_values() if variant == "all values" else rendered(variant)
    built_in = [manifest for manifest in manifests if manifest["kind"] not in CUSTOM_RESOURCES]
    file = write(built_in, tmp_path / "manifests.yaml")
    validated = run_tool("kubernetes-validate", "--strict", "--kubernetes-version", version, str(file))
    assert validated.returncode == 0, validated.stdout + validated.stderr
    assert (validated.stdout + validated.stderr).count(" passed for resource ") == len(built_in) > 0


@pytest.mark.slow
def test_the_operators_accept_their_objects():
    manifests = rendered("autoscaled") + with_all_values()
    custom = [manifest for manifest in manifests if manifest["kind"] in CUSTOM_RESOURCES]
    assert [manifest["kind"] for manifest in custom].count("ScaledObject") == 3
    checked = run_tool("python", CHECK_CUSTOM, given=json.dumps(custom))
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout) == [[]] * len(custom)


def test_the_operator_s_alerts_equal_the_plain_ones():
    (rule,) = of_kind(rendered("autoscaled"), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((DEPLOY / "monitoring" / "alerts.yaml").read_text())


@pytest.mark.parametrize("variant", VARIANTS)
def test_helm_lints_the_chart(variant):
    linted = run_tool("helm", "lint", "--strict", str(CHART), *values_of(variant))
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("api.replica=3", "additional properties 'replica' not allowed"),
        ("models[0].id=Mini_LM", "does not match pattern"),
        ("drainTimeoutSeconds=soon", "want integer"),
        ("autoscaling.enabled=true", "requires serviceMonitor.enabled"),
    ],
)
def test_values_that_make_no_sense_are_refused(values, message):
    refused = run_tool("helm", "template", "x", str(CHART), "--set", values)
    assert refused.returncode != 0
    assert message in refused.stderr


def test_two_models_have_engines_of_their_own_behind_one_name():
    manifests = by_name(with_all_values())
    api = manifests["Deployment", "other-api"]["spec"]["template"]["spec"]["containers"][0]
    assert api["args"][1:4] == [
        "minilm=/models/all-MiniLM-L6-v2",
        "reranker=/models/bge-reranker",
        "--engine-hosts=other-engine:9000",
    ]
    service = manifests["Service", "other-engine"]["spec"]["selector"]
    for number, model in enumerate(("minilm", "reranker"), 1):
        engine = manifests["Deployment", f"other-engine-{model}"]["spec"]["template"]
        assert engine["spec"]["containers"][0]["args"][1] == api["args"][number]
        assert service.items() <= engine["metadata"]["labels"].items()
        for flag in ("--dtype=float32", "--normalize"):
            assert flag in engine["spec"]["containers"][0]["args"]
            assert flag in api["args"]


@pytest.mark.parametrize(
    ("named", "command"),
    [
        ("Helm", ("helm", "version", "--template", "{{.Version}}")),
        ("hadolint", ("hadolint", "--version")),
        ("kubernetes-validate", ("kubernetes-validate", "--version")),
    ],
)
def test_the_page_names_the_versions_of_the_tools(named, command):
    (version,) = set(re.findall(rf"\b{named} (\d[\d.]*\d)", PAGE))
    assert version in run_tool(*command).stdout
