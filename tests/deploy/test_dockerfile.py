"""The Dockerfile: hadolint, and what the manifests rely on."""

import re
import tomllib

import pytest

from tests.deploy.manifests import DEPLOY, TOOLS, run_tool
from tests.server.server_process import ROOT

DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
needs_hadolint = pytest.mark.skipif(not (TOOLS / "hadolint").exists(), reason="scripts/test installs hadolint")


def stages() -> dict[str, tuple[str, str]]:
    """Return the base and the instructions of each stage."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    found = re.findall(r"^FROM (\S+) AS (\S+)\n(.*?)(?=^FROM |\Z)", text, flags=re.M | re.S)
    return {name: (base, instructions) for base, name, instructions in found}


def with_bases(name: str) -> str:
    """Return the instructions of a stage and of those that it is based on."""
    base, instructions = stages()[name]
    return (with_bases(base) if base in stages() else "") + instructions


@needs_hadolint
def test_hadolint_finds_nothing():
    linted = run_tool("hadolint", "--failure-threshold", "style", str(DOCKERFILE))
    assert (linted.returncode, linted.stdout) == (0, "")


@pytest.mark.parametrize("target", ["cpu", "cuda", "slim"])
def test_an_image_is_run_by_a_user_without_rights_and_has_no_build_tools(target):
    base, _ = stages()[target]
    assert base == "runtime"
    instructions = with_bases(target)
    assert re.findall(r"^USER (.*)$", instructions, re.M) == ["10001:10001"]
    assert "HF_HUB_OFFLINE=1" in instructions
    assert "pip install" not in instructions
    (copied,) = re.findall(r"^COPY --from=(\S+) /opt/trio-pool-serve /opt/trio-pool-serve$", instructions, re.M)
    assert copied == f"build-{target}"


def test_all_that_is_copied_is_there_and_not_ignored():
    copied = [
        name.rstrip("/")
        for _, instructions in stages().values()
        for names in re.findall(r"^COPY (?!--from)(.*) \S+$", instructions, re.M)
        for name in names.split()
    ]
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    assert all((ROOT / name).exists() for name in copied)
    assert sorted(line[1:] for line in ignored if line.startswith("!")) == sorted(set(copied))
    assert "*" in ignored
    files = {PYPROJECT["project"]["readme"], *PYPROJECT["project"]["license-files"], "pyproject.toml"}
    assert files <= set(copied), "hatchling reads them"


def test_the_extras_that_are_installed_are_there():
    wanted = re.findall(r'pip install "\.\[(.*?)\]"', DOCKERFILE.read_text())
    assert len(wanted) == 2
    for extras in wanted:
        assert set(extras.split(",")) <= PYPROJECT["project"]["optional-dependencies"].keys()


def test_the_slim_image_has_all_requirements_but_torch_and_transformers_and_its_own(monkeypatch, capsys):
    _, build = stages()["build-slim"]
    (program,) = re.findall(r'python -c "(.*?)" > requirements.txt', build)
    monkeypatch.chdir(ROOT)
    exec(program)
    names = {re.match(r"[\w-]+", line)[0] for line in capsys.readouterr().out.splitlines()}
    project = PYPROJECT["project"]
    wanted = project["dependencies"] + [
        each for e in ("openvino", "otel") for each in project["optional-dependencies"][e]
    ]
    assert {re.match(r"[\w-]+", line)[0] for line in wanted} - names == {"torch", "transformers", "sentencepiece"}
    assert "torch" not in build.replace(program, "")
