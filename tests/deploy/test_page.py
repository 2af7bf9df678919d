"""The commands and examples of docs/kubernetes.md."""

import json
import re
import shlex
import subprocess

import pytest

import trio_pool_serve
from tests.deploy.manifests import PAGE, by_name, manifests_of, needs_tools, rendered, run_tool, templated, values_of
from trio_pool_serve.access.key_file import digest_of, read_key_file
from trio_pool_serve.engine.remote.greeting import LinkKeys

pytestmark = needs_tools


def blocks() -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.M | re.S)
    return [block for language, block in found if not language]


def commands(tool: str) -> list[list[str]]:
    lines = "".join(blocks()).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith(f"{tool} ")]


def test_the_page_downloads_the_model_into_the_volume_that_is_served_and_waits_for_it():
    objects, served = by_name(rendered("models")), by_name(rendered("base"))
    assert objects.keys() == {("PersistentVolumeClaim", "trio-pool-serve-models"), ("Job", "trio-pool-serve-download")}
    for manifest in (objects["Job", "trio-pool-serve-download"], served["Deployment", "trio-pool-serve-api"]):
        pod = manifest["spec"]["template"]["spec"]
        (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "models")
        assert volume["persistentVolumeClaim"]["claimName"] == "trio-pool-serve-models"
        if manifest["kind"] == "Job":
            assert pod["containers"][0]["image"].startswith("registry.example.org/trio-pool-serve-cpu:")
            assert "--local-dir=/models/all-MiniLM-L6-v2" in pod["containers"][0]["args"]
    (waited_for,) = [words[-1] for words in commands("kubectl") if "wait" in words]
    assert waited_for == "job/trio-pool-serve-download"


def test_the_release_of_the_page_is_that_of_its_values():
    ((_, command, _, name, chart, *more),) = commands("helm")
    assert (command, name, chart) == ("upgrade", "trio-pool-serve", "deploy/helm/trio-pool-serve")
    released = by_name(manifests_of(run_tool("helm", "template", name, chart, *more)))
    assert released.keys() == by_name(rendered("autoscaled")).keys()
    for deployed, image, selector in (
        ("trio-pool-serve-api", "cpu", None),
        ("trio-pool-serve-engine-minilm", "cuda", {"cloud.example.org/gpu": "l4"}),
    ):
        pod = released["Deployment", deployed]["spec"]["template"]["spec"]
        of_registry = f"registry.example.org/trio-pool-serve-{image}:{trio_pool_serve.__version__}"
        assert [container["image"] for container in pod["containers"]] == [of_registry]
        assert pod.get("nodeSelector") == selector


def test_the_page_makes_the_secrets_that_pods_read():
    made = {}
    for words in commands("kubectl"):
        if "secret" in words:
            files = {word.partition("=")[2] for word in words if word.startswith("--from-file=")}
            made[words[words.index("generic") + 1]] = files
    wanted: dict[str, set[str]] = {}
    for manifest in templated():
        for volume in manifest["spec"].get("template", {}).get("spec", {}).get("volumes", []):
            if "secret" in volume:
                keys = {item["key"] for item in volume["secret"].get("items", [{"key": "key"}])}
                wanted.setdefault(volume["secret"]["secretName"], set()).update(keys)
    wanted["trio-pool-serve-api-keys"].add("metrics-key")
    assert made == wanted


def test_the_keys_of_the_page_are_keys_of_the_server(tmp_path):
    lines = [line for line in "".join(blocks()).splitlines() if line.startswith(("openssl ", "printf "))]
    subprocess.run(["/bin/sh", "-ec", "\n".join(lines)], cwd=tmp_path, check=True, timeout=60)
    link = LinkKeys(tmp_path / "key")
    link.read()
    assert len(link.keys) == 1
    (tmp_path / "keys.toml").chmod(0o600)
    keys = read_key_file(tmp_path / "keys.toml", ())
    found = {name: keys[digest_of((tmp_path / f"{name}-key").read_text())] for name in ("metrics", "search")}
    assert {name: (key.name, key.admin) for name, key in found.items()} == {
        "metrics": ("prometheus", True),
        "search": ("search", False),
    }
    assert len(keys) == 2


def test_engines_on_cpu_are_scaled_by_batches_of_a_cpu():
    both = by_name(templated(*values_of("cpu"), *values_of("autoscaled")))
    engine = both["Deployment", "trio-pool-serve-engine-minilm"]["spec"]["template"]["spec"]["containers"][0]
    assert "-cpu:" in engine["image"]
    triggers = both["ScaledObject", "trio-pool-serve-engine-minilm"]["spec"]["triggers"]
    assert triggers[0]["metadata"]["threshold"] == "2048"


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_each_image_is_built_under_the_name_that_the_manifests_have(target):
    built = [words[words.index("--tag") + 1] for words in commands("docker") if "build" in words and target in words]
    (name,) = [image.rpartition("/")[2] for image in built]
    of_base = re.findall(rf"trio-pool-serve-{target}:[\w.]+", json.dumps(rendered("base")))
    assert {name} == set(of_base) == {f"trio-pool-serve-{target}:{trio_pool_serve.__version__}"}
    assert set(re.findall(rf"trio-pool-serve-{target}:(\S+)", PAGE)) == {trio_pool_serve.__version__}
