"""The commands and examples of docs/kubernetes.md."""

import re
import shlex

import pytest

import trio_pool_serve
from tests.deploy.manifests import (
    DEPLOY,
    by_name,
    kustomized,
    manifests_of,
    needs_tools,
    run_tool,
    templated,
)
from tests.server.server_process import ROOT

PAGE = (ROOT / "docs" / "kubernetes.md").read_text()

pytestmark = needs_tools


def blocks(language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.M | re.S)
    return [block for of, block in found if of == language]


def commands(tool: str) -> list[list[str]]:
    lines = "".join(blocks()).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith(f"{tool} ")]


def test_the_overlay_of_the_page_renders_with_what_it_changes(tmp_path):
    (overlay,) = blocks("yaml")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kustomization.yaml").write_text(overlay)
    (tmp_path / "deploy").symlink_to(DEPLOY)
    rendered = by_name(manifests_of(run_tool("kubectl", "kustomize", str(tmp_path / "mine"))))
    assert rendered.keys() == by_name(kustomized("overlays/autoscaled")).keys()
    for name, image, selector in (
        ("trio-pool-serve-api", "cpu", None),
        ("trio-pool-serve-engine-minilm", "cuda", {"cloud.example.org/gpu": "l4"}),
    ):
        pod = rendered["Deployment", name]["spec"]["template"]["spec"]
        assert (
            pod["containers"][0]["image"]
            == f"registry.example.org/trio-pool-serve-{image}:{trio_pool_serve.__version__}"
        )
        assert pod.get("nodeSelector") == selector


def test_the_release_of_the_page_is_that_of_its_values():
    ((_, command, _, name, chart, *more),) = commands("helm")
    assert (command, name, chart) == ("upgrade", "trio-pool-serve", "deploy/helm/trio-pool-serve")
    rendered = by_name(manifests_of(run_tool("helm", "template", name, chart, *more)))
    assert rendered.keys() == by_name(kustomized("overlays/autoscaled")).keys()
    images = [
        manifest["spec"]["template"]["spec"]["containers"][0]["image"]
        for (kind, _), manifest in rendered.items()
        if kind == "Deployment"
    ]
    assert all(image.startswith("registry.example.org/trio-pool-serve-") for image in images)


def test_the_secrets_of_the_page_are_those_that_pods_read():
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


def test_the_images_of_the_page_are_of_this_version():
    assert set(re.findall(r"trio-pool-serve-(?:cpu|cuda):(\S+)", PAGE)) == {trio_pool_serve.__version__}


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_each_image_is_built_under_the_name_that_the_manifests_have(target):
    built = [words[words.index("--tag") + 1] for words in commands("docker") if "build" in words and target in words]
    images = {container["image"] for container in _containers()}
    assert [image.rpartition("/")[2] for image in built] == [image for image in images if f"-{target}:" in image]


def _containers() -> list[dict]:
    templates = [manifest["spec"].get("template", {}) for manifest in kustomized("base")]
    return [container for template in templates for container in template.get("spec", {}).get("containers", [])]
