"""The workflows: what they publish, when, and with which permissions."""

import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

import trio_pool_serve
from tests.deploy.manifests import DEPLOY, TOOLS, manifests_of, needs_tools, run_tool
from tests.server.server_process import ROOT

FOLDER = ROOT / ".github" / "workflows"
Workflow = dict[Any, Any]
needs_actionlint = pytest.mark.skipif(not (TOOLS / "actionlint").exists(), reason="scripts/test installs actionlint")


def workflow(name: str) -> Workflow:
    return yaml.safe_load((FOLDER / f"{name}.yml").read_text())


def steps(job: Workflow, action: str) -> list[Workflow]:
    return [step for step in job["steps"] if step.get("uses", "").startswith(f"{action}@")]


@needs_actionlint
def test_actionlint_finds_nothing():
    linted = run_tool("actionlint", "-no-color", "-oneline")
    assert (linted.returncode, linted.stdout) == (0, "")


def triggers(name: str) -> Workflow:
    return workflow(name)[True]  # YAML 1.1 reads `on` as true


def test_only_a_tag_or_a_person_publishes():
    assert triggers("release") == {"push": {"tags": ["v*"]}}
    assert triggers("site") == {"push": {"tags": ["v*"]}, "workflow_dispatch": None}
    assert triggers("images").keys() == {"workflow_dispatch", "workflow_call"}
    jobs = workflow("images")["jobs"]
    (login,), (build,) = (steps(jobs["build"], f"docker/{action}-action") for action in ("login", "build-push"))
    assert (login["if"], jobs["combine"]["if"]) == ("inputs.publish", "inputs.publish")
    assert build["with"]["push"] == "${{ inputs.publish == true }}"


WRITTEN = {
    ("release", "publish"): {"id-token"},
    ("release", "images"): {"packages"},
    ("release", "chart"): {"packages"},
    ("images", "build"): {"packages"},
    ("images", "combine"): {"packages"},
    ("site", "publish"): {"pages", "id-token"},
}


def test_a_job_may_write_only_what_it_publishes():
    found = {}
    for path in FOLDER.glob("*.yml"):
        document = workflow(path.stem)
        assert document["permissions"] == {"contents": "read"}
        for name, job in document["jobs"].items():
            written = {scope for scope, access in job.get("permissions", {}).items() if access == "write"}
            found |= {(path.stem, name): written} if written else {}
    assert found == WRITTEN


def test_nothing_is_published_before_all_checks_have_passed():
    jobs = workflow("release")["jobs"]
    assert "scripts/release" in [step.get("run") for step in jobs["build"]["steps"]]
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "build": None,
        "publish": "build",
        "images": "build",
        "chart": "images",
    }
    assert jobs["images"]["with"] == {"publish": True}


def test_every_image_is_built_for_both_architectures_with_sbom_and_provenance():
    job = workflow("images")["jobs"]["build"]
    targets = re.findall(r"^FROM runtime AS (\w+)$", (DEPLOY / "docker" / "Dockerfile").read_text(), flags=re.M)
    assert sorted(job["strategy"]["matrix"]["image"]) == sorted(targets)
    assert job["strategy"]["matrix"]["arch"] == ["amd64", "arm64"]
    (build,) = steps(job, "docker/build-push-action")
    assert (build["with"]["sbom"], build["with"]["provenance"]) == (True, "mode=max")
    combined = workflow("images")["jobs"]["combine"]["steps"][-1]["run"]
    assert re.findall(r"for image in (.*); do", combined) == [" ".join(job["strategy"]["matrix"]["image"])]


@needs_tools
def test_the_packaged_chart_names_the_images_that_the_workflow_pushes(tmp_path):
    """Run in a copy, with the commands that name images and chart."""
    for name in ("deploy/helm", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / ".venv-deploy").symlink_to(ROOT / ".venv-deploy")
    (package,) = [
        step["run"] for step in workflow("release")["jobs"]["chart"]["steps"] if "scripts/" in step.get("run", "")
    ]
    (image,) = re.findall(r'echo "IMAGE=(.*)" >>', workflow("images")["jobs"]["build"]["steps"][1]["run"])
    names = [f'echo "{image.replace("${{ matrix.image }}", target)}"' for target in ("cpu", "cuda")]
    environment = {"REGISTRY": "registry.example.org", "GITHUB_REPOSITORY": "Owner/Pool", "PATH": "/usr/bin:/bin"}
    ran = subprocess.run(
        ["bash", "-ec", "\n".join([package, *names])],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    version = trio_pool_serve.__version__
    pushed = {f"{name}:{version}" for name in ran.stdout.splitlines()[-2:]}
    assert pushed == {f"registry.example.org/owner/pool-{target}:{version}" for target in ("cpu", "cuda")}
    (chart,) = (tmp_path / "build" / "chart").glob("*.tgz")
    assert chart.name == f"trio-pool-serve-{version}.tgz"
    objects = manifests_of(run_tool("helm", "template", "x", str(chart)))
    pods = [each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment"]
    assert {container["image"] for pod in pods for container in pod["containers"]} == pushed
