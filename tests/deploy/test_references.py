"""What objects say about each other: whom selectors select, whom policies let in, what queries ask for."""

import re
from typing import Any

import attrs
import pytest

from tests.deploy.manifests import VARIANTS, Manifest, by_name, needs_tools, of_kind, rendered
from trio_pool_serve.engine.engine_statistics import EngineStatistics
from trio_pool_serve.telemetry.metrics import PREFIX

pytestmark = needs_tools

ALL = "autoscaled"
"""Has objects of every kind."""


def deployments() -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest["spec"] for manifest in of_kind(rendered(ALL), "Deployment")}


def selected_by(labels: dict[str, str]) -> list[str]:
    assert labels
    return [
        name for name, spec in deployments().items() if labels.items() <= spec["template"]["metadata"]["labels"].items()
    ]


API, ENGINE = ["trio-pool-serve-api"], ["trio-pool-serve-engine-minilm"]


def test_all_selectors_select_the_pods_of_one_deployment():
    found: list[tuple[str, list[str]]] = []
    for (kind, name), manifest in by_name(rendered(ALL)).items():
        spec: dict[str, Any] = manifest["spec"]
        match kind:
            case "Service":
                labels = spec["selector"]
            case "Deployment":
                labels = spec["selector"]["matchLabels"]
                for constraint in spec["template"]["spec"]["topologySpreadConstraints"]:
                    assert selected_by(constraint["labelSelector"]["matchLabels"]) == [name]
            case "PodDisruptionBudget":
                labels = spec["selector"]["matchLabels"]
            case "NetworkPolicy":
                labels = spec["podSelector"]["matchLabels"]
            case _:
                continue
        assert selected_by(labels) == (API if "-api" in name else ENGINE), (kind, name)
        found.append((kind, selected_by(labels)))
    for kind in ("Service", "Deployment", "PodDisruptionBudget", "NetworkPolicy"):
        assert [selected for each, selected in found if each == kind] in ([API, ENGINE], [ENGINE, API]), kind


def peers(rule: Manifest, of: str) -> list[Any]:
    return [
        selected_by(peer["podSelector"]["matchLabels"]) if "podSelector" in peer else peer["namespaceSelector"]
        for peer in rule.get(of, [])
    ]


def ports(rule: Manifest) -> list[int]:
    return [port["port"] for port in rule["ports"]]


DNS = [("UDP", 53), ("TCP", 53), ("UDP", 5353), ("TCP", 5353)]
"""The second two are OpenShift's: a policy sees the port of the pod behind the Service."""


def test_only_api_pods_reach_the_engines_and_only_prometheus_their_metrics():
    policies = {manifest["metadata"]["name"]: manifest["spec"] for manifest in of_kind(rendered(ALL), "NetworkPolicy")}
    api, engine = policies["trio-pool-serve-api"], policies["trio-pool-serve-engine"]
    assert all(sorted(policy["policyTypes"]) == ["Egress", "Ingress"] for policy in (api, engine))
    assert [(peers(rule, "from"), ports(rule)) for rule in engine["ingress"]] == [
        ([API], [9000]),
        ([{"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}], [9001]),
    ]
    assert engine["egress"] == []
    assert [(peers(rule, "from"), ports(rule)) for rule in api["ingress"]] == [([], [8000])]
    names, rows = api["egress"]
    assert (peers(names, "to"), [(port["protocol"], port["port"]) for port in names["ports"]]) == ([], DNS)
    assert (peers(rows, "to"), ports(rows)) == ([ENGINE], [9000])


def test_prometheus_finds_each_port_with_metrics():
    services = of_kind(rendered(ALL), "Service")
    scraped = []
    for monitor in of_kind(rendered(ALL), "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        (service,) = (each for each in services if wanted.items() <= each["metadata"]["labels"].items())
        for endpoint in monitor["spec"]["endpoints"]:
            (port,) = (each["port"] for each in service["spec"]["ports"] if each["name"] == endpoint["port"])
            scraped.append((service["metadata"]["name"], port, endpoint["path"], "authorization" in endpoint))
    assert sorted(scraped) == [
        ("trio-pool-serve-api", 8000, "/metrics", True),
        ("trio-pool-serve-engine", 9001, "/metrics", False),
    ]


def test_keda_alone_decides_how_many_engines_there_are():
    (scaled,) = of_kind(rendered(ALL), "ScaledObject")
    assert [scaled["spec"]["scaleTargetRef"]["name"]] == ENGINE
    assert "replicas" not in deployments()[ENGINE[0]]
    assert "replicas" in deployments()[API[0]]


def test_queries_ask_for_metrics_and_labels_that_there_are():
    (scaled,) = of_kind(rendered(ALL), "ScaledObject")
    (container,) = deployments()[ENGINE[0]]["template"]["spec"]["containers"]
    gauges = EngineStatistics("ready", **{each.name: 0 for each in attrs.fields(EngineStatistics)[1:]}).gauges()
    asked = []
    for trigger in scaled["spec"]["triggers"]:
        ((metric, matchers),) = re.findall(r"(\w+)\{(.*?)\}", trigger["metadata"]["query"])
        labels = dict(re.findall(r'(\w+)="([^"]*)"', matchers))
        asked.append(labels.pop("of"))
        assert asked[-1] in gauges[metric.removeprefix(PREFIX)]
        assert labels.pop("model") == container["args"][1].partition("=")[0]
        service = "trio-pool-serve-api" if asked[-1] == "queued_tokens" else "trio-pool-serve-engine"
        assert labels == {"namespace": scaled["metadata"]["namespace"], "service": service}
        assert by_name(rendered(ALL))["Service", labels["service"]]["metadata"]["namespace"] == labels["namespace"]
    assert asked == ["queued_tokens", "in_flight_batches"]


def test_queries_average_a_sum_so_that_an_engine_and_its_successor_are_not_both_counted():
    """A sum of averages has each engine that ended within the window in full, beside the one that replaced it."""
    (scaled,) = of_kind(rendered(ALL), "ScaledObject")
    queries = [re.sub(r"\{.*?\}", "", trigger["metadata"]["query"]) for trigger in scaled["spec"]["triggers"]]
    assert queries == [
        "avg_over_time(sum(trio_pool_serve_engine)[1m:15s])",
        "avg_over_time(sum(trio_pool_serve_engine > bool 0)[5m:15s])",
    ]


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_objects_are_in_one_namespace(variant):
    assert {manifest["metadata"]["namespace"] for manifest in rendered(variant)} == {"trio-pool-serve"}
