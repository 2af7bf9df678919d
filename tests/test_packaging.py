"""What is published: public names, version, changelog and requirements; and what checks them."""

import ast
import re
import runpy
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import trio_pool_serve
from tests.conftest import client_of
from tests.models.model_families import pooling, write_family
from tests.server.server_process import ROOT, free_port, started

CHANGELOG = runpy.run_path(str(ROOT / "scripts" / "changelog.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


# -- public names --------------------------------------------------------------------------------------


def test_every_public_name_exists_and_is_documented():
    page = (ROOT / "docs" / "stability.md").read_text()
    for name in trio_pool_serve.__all__:
        assert hasattr(trio_pool_serve, name), name
        assert f"`{name}`" in page, name


def test_a_name_that_is_not_public_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'Renderer'"):
        _ = trio_pool_serve.Renderer


def test_type_checkers_see_the_names_that_are_imported_when_used():
    tree = ast.parse(Path(trio_pool_serve.__file__).read_text())
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {(alias.asname, imported.module, alias.name) for imported in guarded.body for alias in imported.names}
    modules = trio_pool_serve._MODULES
    assert seen == {(name, f"trio_pool_serve.{module}", name) for name, module in modules.items()}
    assert trio_pool_serve.__all__ == ["__version__", *sorted(modules)]


def test_importing_the_package_imports_no_dependency():
    code = (
        "import sys; before = set(sys.modules); import trio_pool_serve; after = set(sys.modules) - before; "
        "print(*sorted({name.partition('.')[0] for name in after} - sys.stdlib_module_names))"
    )
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert printed.split() == ["trio_pool_serve"]


HEAVY = ("torch", "transformers", "openvino", "huggingface_hub", "httpx", "rich", "PIL", "ml_dtypes", "swagger_ui")
RARE = ("pyarrow", "opentelemetry", "trio_pool_serve.bulk", "trio_pool_serve.load.run_bench")
OF_COMMANDS = ("matplotlib", "trio_pool_serve.checking.check_model", "cyclopts.completion.bash")
OF_HTTP = ("quart", "werkzeug", "asyncio", "hypercorn", "trio_pool_serve.api")

LIGHT = {
    "the public names": ("from trio_pool_serve import *; Config, serve", ("torch",)),
    "the kinds of models": ("import trio_pool_serve.models.folder", ("torch",)),
    "an engine process": (
        "import trio_pool_serve.server.engine_process",
        ("torch", "quart", "hypercorn", "trio_pool_serve.cli", "trio_pool_serve.app"),
    ),
    "the launcher": ("import trio_pool_serve.cli, trio_pool_serve.server.launcher", HEAVY + RARE + OF_HTTP),
    "an API process": ("import trio_pool_serve.cli, trio_pool_serve.server.api_process", HEAVY + RARE),
    "the command line": (
        "from trio_pool_serve.cli import make_app; make_app()",
        ("torch", "transformers", "trio_pool_serve.load.run_bench", *OF_COMMANDS),
    ),
}


@pytest.mark.parametrize(("statement", "not_needed"), LIGHT.values(), ids=LIGHT)
def test_nothing_is_imported_that_may_never_be_used(statement, not_needed):
    """It would take time before a server listens or a command runs, and memory in each process."""
    program = f"import sys; {statement}; print({{*{not_needed}}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


async def test_the_example_of_the_public_names_serves(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "stability.md").read_text(), flags=re.S)
    assert "path/or/hub-id" in example
    assert "8080" in example
    port = free_port()
    program = tmp_path / "embedding_server.py"
    model = write_family(tmp_path / "model", "bert", modules=[pooling("mean")])
    program.write_text(example.replace("path/or/hub-id", str(model)).replace("8080", str(port)))
    env = {"PYTHONPATH": str(ROOT)}
    with started([sys.executable, str(program)], port, tmp_path / "server.log", env) as server:
        await server.wait_until("/readyz")
        async with client_of(server.url) as client:
            answer = await client.post("/v1/embeddings", json={"input": "Hello, world"})
        assert len(answer.json()["data"][0]["embedding"]) == 32
        server.signal(signal.SIGTERM)
        assert await server.wait_exit() == 0


# -- version and changelog -----------------------------------------------------------------------------


def test_the_changelog_has_the_version_of_the_package():
    assert CHANGELOG["package_version"]() == trio_pool_serve.__version__
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "trio_pool_serve/__init__.py"
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert CHANGELOG["release"](changelog, trio_pool_serve.__version__, allow_unreleased=True)


def test_the_notes_of_a_release_are_those_of_its_version():
    changelog = "# Changelog\n\n## Unreleased\n\n## 0.2.0 - 2027-01-31\n### Added\n- b\n\n## 0.1.0 - 2026-11-22\n- a\n"
    assert CHANGELOG["release"](changelog, "0.2.0", allow_unreleased=False) == "### Added\n- b"


@pytest.mark.parametrize(
    ("changelog", "message"),
    [
        ("## Unreleased\n\n## 0.1.0 - 2026-11-22\n- a\n", "latest entry of CHANGELOG.md is 0.1.0"),
        ("## Unreleased\n- b\n\n## 0.2.0 - 2027-01-31\n- a\n", "has changes under"),
        ("## 0.2.0 - 2027-01-31\n- a\n\n## 0.1.0 - 2026-11-22\n- a\n", "does not begin with"),
        ("## Unreleased\n- a\n", "does not begin with"),
        ("## Unreleased\n\n## 0.2.0\n- a\n", "not `## VERSION - DATE`"),
    ],
)
def test_a_changelog_that_is_not_ready_stops_the_release(changelog, message):
    with pytest.raises(ValueError, match=message):
        CHANGELOG["release"](changelog, "0.2.0", allow_unreleased=False)


# -- what is installed and released --------------------------------------------------------------------


def test_all_that_is_installed_has_an_exact_version():
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in re.findall(r"^([\w.-]+)==", constraints, flags=re.M)}
    project = PYPROJECT["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in wanted}
    assert names <= pinned


def test_the_readme_of_a_release_links_to_the_repository():
    """The package index shows it without the files beside it."""
    absolute = runpy.run_path(str(ROOT / "scripts" / "readme_links.py"))["with_absolute_links"]
    page = (ROOT / "README.md").read_text() + "[limits](#limits)\n"
    environment = {"GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "us/it", "GITHUB_REF_NAME": "v1"}
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", absolute(page, environment))
    assert ("!", "https://host/us/it/raw/v1/docs/pictures/peers.svg") in links
    assert ("", "https://host/us/it/blob/v1/docs/README.md") in links
    assert links[-1] == ("", "https://host/us/it/blob/v1/README.md#limits")
    assert [link for _, link in links if "://" not in link] == []
    assert absolute(page, {}) == page


@pytest.mark.slow
def test_a_dry_run_of_a_release_passes():
    """It says what it has checked, and what only a release or another machine can."""
    done = subprocess.run([ROOT / "scripts" / "release", "--dry-run"], check=True, stdout=subprocess.PIPE, text=True)
    _, _, said = done.stdout.rpartition("\nchecked in ")
    checked, _, not_checked = said.partition("not checked:\n")
    assert f"version {trio_pool_serve.__version__}\n" in checked
    for what in ("workflows", "Dockerfile", "chart", "site", "sdist and wheel", "answers a request"):
        assert what in (checked if what != "chart" or "helm" in checked else not_checked), what
    assert "the images" in not_checked


# -- tools ---------------------------------------------------------------------------------------------


def test_hooks_of_pre_commit_are_the_checks_of_the_test_script():
    script = (ROOT / "scripts" / "test").read_text()
    checks = [" ".join(check) for check in re.findall(r'"\$venv/bin/(ruff|mypy)"((?: [\w.-]+)*)', script)]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"].removeprefix(".venv/bin/") for hook in local["hooks"]]
    assert len(checks) == 3
    assert sorted(entries) == sorted(" ".join(check.split()) for check in checks)


def test_the_workflow_runs_the_test_script_on_every_supported_python():
    document = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    assert {"push", "pull_request", "schedule"} == document[True].keys()  # YAML 1.1 reads `on` as true
    job = document["jobs"]["test"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["scripts/size", "scripts/test ${{ github.event_name == 'schedule' && 'rest' || '' }}"]
    prefix = "Programming Language :: Python :: "
    classifiers = PYPROJECT["project"]["classifiers"]
    assert job["strategy"]["matrix"]["python"] == [
        classifier.removeprefix(prefix) for classifier in classifiers if classifier.startswith(prefix)
    ]
