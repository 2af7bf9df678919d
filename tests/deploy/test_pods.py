"""What pods are allowed and asked, and what objects say about each other."""

import re
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

import trio_pool_serve
from tests.deploy.manifests import CHART, VARIANTS, Manifest, by_name, needs_tools, of_kind, rendered
from trio_pool_serve.command_line.server_commands import read_settings
from trio_pool_serve.engine.engine_statistics import EngineStatistics
from trio_pool_serve.telemetry.metrics import PREFIX

pytestmark = needs_tools
USER = 10001
"""That of the image."""

SPARE_S = 15
"""What a pod needs after a drain that took all of its time."""

ALL = (*VARIANTS, "models")
API, ENGINE = ("Deployment", "trio-pool-serve-api"), ("Deployment", "trio-pool-serve-engine-minilm")


def pods(variant: str) -> Iterator[Manifest]:
    for manifest in rendered(variant):
        if "template" in manifest["spec"]:
            yield manifest["spec"]["template"]["spec"]


def pod(variant: str, name: tuple[str, str]) -> Manifest:
    return by_name(rendered(variant))[name]["spec"]["template"]["spec"]


def flags(container: Manifest) -> dict[str, str]:
    return dict(re.fullmatch(r"--([\w-]+)(?:=(.*))?", each).groups() for each in container["args"] if each[0] == "-")


@pytest.mark.parametrize("variant", ALL)
def test_pods_keep_to_the_restricted_standard_write_only_where_they_must_and_get_no_settings_from_services(variant):
    for each in pods(variant):
        security = each["securityContext"]
        assert security["runAsNonRoot"] is True
        assert {security["runAsUser"], security["runAsGroup"], security["fsGroup"]} == {USER}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert each["automountServiceAccountToken"] is False
        assert each["enableServiceLinks"] is False, "a Service called trio-pool-serve would set variables of settings"
        assert not any("hostPath" in volume for volume in each["volumes"])
        for container in each["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            assert written == ({"/data", "/tmp"} if variant != "models" else {"/data", "/tmp", "/models"})


@pytest.mark.parametrize("variant", ALL)
def test_containers_request_resources_and_limit_memory_in_images_of_this_version(variant):
    for container in [container for each in pods(variant) for container in each["containers"]]:
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory"} <= requests.keys()
        assert "memory" in limits
        assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu")
        assert container["image"].rpartition(":")[2] == trio_pool_serve.__version__
    version = trio_pool_serve.__version__
    assert f"\nversion: {version}\nappVersion: {version}\n" in (CHART / "Chart.yaml").read_text()


@pytest.mark.parametrize(("variant", "gpus", "image"), [("base", "1", "cuda"), ("cpu", None, "cpu")])
def test_an_engine_has_one_gpu_or_cores_of_its_own(variant, gpus, image):
    (engine,) = pod(variant, ENGINE)["containers"]
    requests, limits = engine["resources"]["requests"], engine["resources"]["limits"]
    assert requests.get("nvidia.com/gpu") == gpus
    assert f"-{image}:" in engine["image"]
    assert gpus or requests == limits, "with static CPU management only equal whole numbers give cores"
    (api,) = pod(variant, API)["containers"]
    assert "-cpu:" in api["image"]
    assert "nvidia.com/gpu" not in api["resources"]["limits"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [API, ENGINE])
def test_pods_are_spread_over_zones_and_nodes_and_have_more_time_to_end_than_their_drain_takes(variant, name):
    """Both constraints have to be named: a pod that has any does not get the scheduler's own."""
    each = pod(variant, name)
    constraints = [
        (constraint["topologyKey"], constraint["maxSkew"], constraint["whenUnsatisfiable"])
        for constraint in each["topologySpreadConstraints"]
    ]
    assert constraints == [
        (key, 1, "ScheduleAnyway") for key in ("topology.kubernetes.io/zone", "kubernetes.io/hostname")
    ]
    (container,) = each["containers"]
    before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert each["terminationGracePeriodSeconds"] >= before + int(flags(container)["drain-timeout-s"]) + SPARE_S
    assert (before > 0) == (name == API), "load balancers find API pods, API processes find engines"


@pytest.mark.parametrize(
    ("name", "port", "paths"),
    [(API, 8000, ("/livez", "/readyz", "/livez")), (ENGINE, 9001, ("/readyz", "/readyz", "/livez"))],
)
def test_each_probe_asks_the_path_of_its_kind(name, port, paths):
    (container,) = pod("base", name)["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    for kind, path in zip(("startupProbe", "readinessProbe", "livenessProbe"), paths, strict=True):
        probe = container[kind]["httpGet"]
        assert (probe["path"], ports[probe["port"]]) == (path, port), kind


def test_the_ports_equal_the_flags():
    (api,) = pod("base", API)["containers"]
    (engine,) = pod("base", ENGINE)["containers"]
    assert [each["containerPort"] for each in api["ports"]] == [int(flags(api)["port"])]
    listened = [flags(engine)[flag].rpartition(":")[2] for flag in ("listen", "probe-listen")]
    assert [str(each["containerPort"]) for each in engine["ports"]] == listened
    host, _, port = flags(api)["engine-hosts"].partition(":")
    service = by_name(rendered("base"))["Service", host]["spec"]
    assert service["clusterIP"] == "None"
    assert [str(each["port"]) for each in service["ports"]] == listened
    assert port == listened[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_are_files_and_models_are_read_offline(variant):
    for name in (API, ENGINE):
        each = pod(variant, name)
        (container,) = each["containers"]
        environment = {variable["name"]: variable for variable in container["env"]}
        assert environment["HF_HUB_OFFLINE"]["value"] == "1"
        assert not any("secretKeyRef" in variable.get("valueFrom", {}) for variable in environment.values())
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in each["volumes"]}
        files = [value for flag, value in flags(container).items() if flag in ("key-file", "api-keys-file")]
        assert len(files) == (2 if name == API else 1)
        for file in files:
            secret = volumes[mounted[file.rpartition("/")[0]]]["secret"]
            assert secret["defaultMode"] == 0o440
            assert not secret.get("items") or file.endswith(f"/{secret['items'][0]['path']}")
        folders = [argument.partition("=")[2] for argument in container["args"] if "=/models/" in argument]
        assert folders == ["/models/all-MiniLM-L6-v2"]
        assert volumes[mounted["/models"]]["persistentVolumeClaim"]["readOnly"] is True


# -- the commands accept the arguments of their pods


def arguments(zone: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for manifest in (manifest for variant in VARIANTS for manifest in rendered(variant)):
        if manifest["kind"] == "Deployment":
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            given = [argument.replace("$(ZONE)", zone) for argument in container["args"]]
            assert found.setdefault(given[0], given) == given
    return found


@pytest.mark.parametrize("zone", ["", "europe-west4-a"])
@pytest.mark.parametrize("command", ["serve", "engine"])
def test_the_commands_accept_the_arguments_of_pods(command, zone):
    given = arguments(zone)
    assert set(given) == {"serve", "engine"}
    settings = read_settings(command, given[command][1:])
    assert (settings if command == "serve" else settings.config).hosts.zone == zone


# -- what objects say about each other: whom selectors select, whom policies let in, what queries ask for

EVERY = "autoscaled"
"""Has objects of every kind."""

OF_API, OF_ENGINE = [API[1]], [ENGINE[1]]


def deployments() -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest["spec"] for manifest in of_kind(rendered(EVERY), "Deployment")}


def selected_by(labels: dict[str, str]) -> list[str]:
    assert labels
    return [
        name for name, spec in deployments().items() if labels.items() <= spec["template"]["metadata"]["labels"].items()
    ]


SELECTORS = {
    "Service": lambda spec: spec["selector"],
    "Deployment": lambda spec: spec["selector"]["matchLabels"],
    "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
    "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
}


@pytest.mark.parametrize("kind", SELECTORS)
def test_all_selectors_select_the_pods_of_one_deployment(kind):
    selected = []
    for manifest in of_kind(rendered(EVERY), kind):
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        selected.append(selected_by(SELECTORS[kind](spec)))
        assert selected[-1] == (OF_API if "-api" in name else OF_ENGINE), name
        for constraint in spec["template"]["spec"]["topologySpreadConstraints"] if kind == "Deployment" else ():
            assert selected_by(constraint["labelSelector"]["matchLabels"]) == [name]
    assert sorted(selected) == [OF_API, OF_ENGINE]


def peers(rule: Manifest, of: str) -> list[Any]:
    return [
        selected_by(peer["podSelector"]["matchLabels"]) if "podSelector" in peer else peer["namespaceSelector"]
        for peer in rule.get(of, [])
    ]


def test_only_api_pods_reach_the_engines_and_only_prometheus_their_metrics():
    def allowed(rules: list[Manifest], of: str) -> list[tuple[list[Any], list[int]]]:
        return [(peers(rule, of), [port["port"] for port in rule["ports"]]) for rule in rules]

    monitoring = {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(rendered(EVERY), "NetworkPolicy")}
    api, engine = policies["trio-pool-serve-api"], policies["trio-pool-serve-engine"]
    assert all(sorted(policy["policyTypes"]) == ["Egress", "Ingress"] for policy in (api, engine))
    assert allowed(engine["ingress"], "from") == [([OF_API], [9000]), ([monitoring], [9001])]
    assert engine["egress"] == []
    assert allowed(api["ingress"], "from") == [([], [8000])]
    # The second two are OpenShift's: a policy sees the port of the pod behind the Service.
    assert allowed(api["egress"], "to") == [([], [53, 53, 5353, 5353]), ([OF_ENGINE], [9000])]
    assert [port["protocol"] for port in api["egress"][0]["ports"]] == ["UDP", "TCP", "UDP", "TCP"]


def test_prometheus_finds_each_port_with_metrics():
    scraped, services = [], of_kind(rendered(EVERY), "Service")
    for monitor in of_kind(rendered(EVERY), "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = (each for each in services if wanted <= each["metadata"]["labels"].items())
        ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            at = (service["metadata"]["name"], ports[endpoint["port"]], endpoint["path"])
            scraped.append((*at, "authorization" in endpoint))
    assert sorted(scraped) == [
        ("trio-pool-serve-api", 8000, "/metrics", True),
        ("trio-pool-serve-engine", 9001, "/metrics", False),
    ]


def test_keda_alone_decides_how_many_engines_there_are():
    (scaled,) = of_kind(rendered(EVERY), "ScaledObject")
    assert [scaled["spec"]["scaleTargetRef"]["name"]] == OF_ENGINE
    assert "replicas" not in deployments()[ENGINE[1]]
    assert "replicas" in deployments()[API[1]]


def test_queries_ask_for_metrics_and_labels_that_there_are():
    """They average a sum: a sum of averages would have each engine that ended, beside the one that replaced it."""
    (scaled,) = of_kind(rendered(EVERY), "ScaledObject")
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert [re.sub(r"\{.*?\}", "", query) for query in queries] == [
        "avg_over_time(sum(trio_pool_serve_engine)[1m:15s])",
        "avg_over_time(sum(trio_pool_serve_engine > bool 0)[5m:15s])",
    ]
    (container,) = deployments()[ENGINE[1]]["template"]["spec"]["containers"]
    gauges = EngineStatistics("ready", **{each.name: 0 for each in attrs.fields(EngineStatistics)[1:]}).gauges()
    namespace = scaled["metadata"]["namespace"]
    for query, of, service in zip(queries, ("queued_tokens", "in_flight_batches"), ("api", "engine"), strict=True):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', query))
        service = f"trio-pool-serve-{service}"
        model = container["args"][1].partition("=")[0]
        assert labels == {"of": of, "model": model, "namespace": namespace, "service": service}
        assert of in gauges["trio_pool_serve_engine".removeprefix(PREFIX)]
        assert by_name(rendered(EVERY))["Service", service]["metadata"]["namespace"] == namespace
