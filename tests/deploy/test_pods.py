"""What pods are allowed and asked."""

import re
from collections.abc import Iterator

import pytest

import trio_pool_serve
from tests.deploy.manifests import CHART, VARIANTS, Manifest, by_name, needs_tools, rendered

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
def test_containers_request_resources_and_limit_memory(variant):
    for each in pods(variant):
        for container in each["containers"]:
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert {"cpu", "memory"} <= requests.keys()
            assert "memory" in limits
            assert requests.get("nvidia.com/gpu") == limits.get("nvidia.com/gpu")


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
def test_pods_are_spread_over_zones_and_nodes_and_start_where_there_is_but_one(variant, name):
    """Both have to be named: a pod that has constraints does not get the scheduler's own."""
    constraints = pod(variant, name)["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in constraints] == ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]
    for each in constraints:
        assert (each["maxSkew"], each["whenUnsatisfiable"]) == (1, "ScheduleAnyway")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [API, ENGINE])
def test_a_pod_has_more_time_to_end_than_its_drain_takes(variant, name):
    each = pod(variant, name)
    (container,) = each["containers"]
    before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    drain = int(flags(container)["drain-timeout-s"])
    assert each["terminationGracePeriodSeconds"] >= before + drain + SPARE_S
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


def test_the_job_downloads_the_model_into_the_volume_that_is_served():
    download, api = pod("models", ("Job", "trio-pool-serve-download")), pod("base", API)
    assert "--local-dir=/models/all-MiniLM-L6-v2" in download["containers"][0]["args"]
    (downloaded,), (served,) = (
        [volume["persistentVolumeClaim"]["claimName"] for volume in each["volumes"] if volume["name"] == "models"]
        for each in (download, api)
    )
    assert downloaded == served
    assert ("PersistentVolumeClaim", served) in by_name(rendered("models"))


@pytest.mark.parametrize("variant", ALL)
def test_the_images_are_of_this_version(variant):
    for each in pods(variant):
        for container in each["containers"]:
            assert container["image"].rpartition(":")[2] == trio_pool_serve.__version__
    assert (
        f"\nversion: {trio_pool_serve.__version__}\nappVersion: {trio_pool_serve.__version__}\n"
        in (CHART / "Chart.yaml").read_text()
    )
