"""What the scripts install: from pip's package sources, and no build of torch for GPUs where there is one for CPUs."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from attrs import frozen

import trio_pool_serve
from tests.server.server_process import ROOT

SOURCES = runpy.run_path(str(ROOT / "scripts" / "package_sources.py"))

TORCH = "2.13.0"


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {each}\n" for each in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def write_index(root: Path, **packages: Sequence[tuple[str, ...]]) -> str:
    """Write a package index of small wheels; return its URL."""
    for name, versions in packages.items():
        folder = root / name.replace("_", "-")
        for version, *requires in versions:
            write_wheel(folder, name, version, *requires)
        links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in sorted(folder.glob("*.whl")))
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return root.as_uri()


@frozen
class Checkout:
    """A folder with the scripts, whose .venv is the one that runs the tests, and an environment to install into."""

    root: Path

    @property
    def target(self) -> Path:
        return self.root / "target"

    def install(self, *packages: str, **environment: str) -> str:
        """Have the scripts install packages from the sources of pip's variables; return what they say."""
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root),
            "PIP_CONFIG_FILE": os.devnull,
            "POOL_CONSTRAINTS": str(self.root / "constraints.txt"),  # so that PyTorch's own index is not tried
            "UV_CACHE_DIR": str(self.root / "cache"),
            **environment,
        }
        script = 'set -euo pipefail; source scripts/environment.sh; install_into target "$@"'
        done = subprocess.run(
            ["bash", "-c", script, "bash", *packages],
            cwd=self.root,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    @property
    def installed(self) -> dict[str, str]:
        (site,) = self.target.glob("lib/python*/site-packages")
        stems = (path.name.removesuffix(".dist-info").rpartition("-") for path in site.glob("*.dist-info"))
        return {name: version for name, _, version in stems if name not in ("pip", "setuptools")}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    if not (Path(sys.prefix) / "bin" / "uv").exists():
        pytest.skip("uv is not installed")
    (tmp_path / "scripts").mkdir()
    for name in ("environment.sh", "package_sources.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    uv = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("uv=="))
    (tmp_path / "constraints.txt").write_text(f"{uv}\ntorch=={TORCH}\n")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    # With the interpreter's own pip: to install another one takes seconds.
    without = ("--without-pip", "--system-site-packages")
    subprocess.run([sys.executable, "-m", "venv", *without, str(tmp_path / "target")], check=True)
    return Checkout(tmp_path)


CUDA_BUILD = {"torch": [(TORCH, "nvidia-cublas"), ("2.14.0", "nvidia-cublas")], "nvidia_cublas": [("13.0",)]}


def test_a_cpu_build_among_the_sources_is_taken_and_stays_when_other_packages_need_torch(checkout: Checkout):
    index = write_index(checkout.root / "index", **CUDA_BUILD, user=[("1.0", "torch>=2")])
    write_wheel(checkout.root / "wheels", "torch", f"{TORCH}+cpu")
    said = checkout.install("torch", PIP_INDEX_URL=index, PIP_FIND_LINKS=str(checkout.root / "wheels"))
    assert checkout.installed == {"torch": f"{TORCH}+cpu"}, "nothing of NVIDIA's"
    assert "pip" not in said, "uv has installed it"
    checkout.install("user", PIP_INDEX_URL=index)
    assert checkout.installed == {"torch": f"{TORCH}+cpu", "user": "1.0"}


def test_the_best_version_of_all_sources_is_taken_as_by_pip(checkout: Checkout):
    """A mirror that has only an older version does not hide the newer one of another source."""
    first = write_index(checkout.root / "first", some=[("2.0",)])
    second = write_index(checkout.root / "second", some=[("1.0",)])
    for one, other in ((first, second), (second, first)):
        said = checkout.install("--reinstall-package", "some", "some", PIP_INDEX_URL=one, PIP_EXTRA_INDEX_URL=other)
        assert checkout.installed == {"some": "2.0"}
        assert "pip" not in said


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"PIP_ONLY_BINARY": ":all:"}, "pip's setting only-binary has no equal for uv\ninstalling with pip\n"),
        ({"UV_DEFAULT_INDEX": "file:///nowhere"}, "uv has failed: installing with pip"),
        ({"POOL_INSTALLER": "pip"}, ""),
    ],
    ids=["a setting that uv lacks", "uv fails", "chosen"],
)
def test_pip_installs_where_uv_cannot_or_is_not_wanted(checkout: Checkout, environment: dict[str, str], told: str):
    index = write_index(checkout.root / "index", some=[("1.0",)])
    said = checkout.install("some", PIP_INDEX_URL=index, **environment)
    assert told in said
    assert told or "some==1.0" not in said
    assert checkout.installed == {"some": "1.0"}


def test_settings_of_pip_become_variables_of_uv():
    settings = [
        ("global.index-url", "https://mirror/simple"),
        ("global.timeout", "15"),
        ("install.timeout", "20.0"),
        ("install.extra-index-url", "https://one/simple\n  https://two/simple"),
        ("download.index-url", "https://not-for-install"),
        (":env:.find-links", "/wheels /more"),
        (":env:.trusted_host", "mirror one"),
        (":env:.extra-index-url", "https://user:password@three/simple"),
        ("global.cert", "/ca.pem"),
        ("global.disable-pip-version-check", "1"),
        ("global.proxy", ""),
    ]
    merged = SOURCES["merged"](settings)
    assert merged["timeout"] == "20.0"
    assert merged["extra-index-url"] == "https://user:password@three/simple"
    assert merged["index-url"] == "https://mirror/simple"
    assert SOURCES["uv_variables"](merged) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://mirror/simple",
        "UV_INDEX": "https://user:password@three/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INSECURE_HOST": "mirror one",
        "UV_HTTP_TIMEOUT": "20",
        "SSL_CERT_FILE": "/ca.pem",
    }


# -- the commands of docs/install.md, with real packages --------------------------------------------------

COMMANDS = {
    tool: command
    for language, command in re.findall(
        r"^```(\w*)\n(.*?)\n```$", (ROOT / "docs/install.md").read_text(), flags=re.M | re.S
    )
    for tool in ("uv build", "uvx", "uv tool", "pipx")
    if f"{tool} " in f"{command} " and not language
}
"""By their tools."""


@frozen
class User:
    """A home with nothing in it, in which commands are run as the page has them, but without an index out of reach."""

    home: Path

    def run(self, command: str) -> str:
        """Run a command in a folder with ``dist/`` and constraints.txt; return what it prints."""
        sources = SOURCES["uv_variables"](SOURCES["merged"](SOURCES["pip_settings"]()))
        if not SOURCES["reaches_torch_index"]():
            command = command.replace("--torch-backend auto ", "")
            command = command.replace("--extra-index-url https://download.pytorch.org/whl/cpu ", "")
        pip = {
            name: value for name, value in os.environ.items() if name.startswith("PIP_") and name != "PIP_CONSTRAINT"
        }
        env = {
            **pip,
            **sources,
            "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]]),
            "HOME": str(self.home),
            "UV_PYTHON_DOWNLOADS": "never",
            "UV_BUILD_CONSTRAINT": "constraints.txt",
        }
        return subprocess.run(
            ["bash", "-c", command], cwd=self.home, env=env, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def assert_has_torch_for_cpus(self) -> None:
        """Fail unless what is installed in the home has no CUDA, on a machine that has no GPU."""
        if Path("/dev/nvidiactl").exists():
            return
        sites = {path.parent for path in self.home.rglob("site-packages/torch-*.dist-info")}
        assert sites
        for site in sites:
            assert list(site.glob("torch-*+cpu.dist-info"))
            assert not list(site.glob("nvidia_*"))


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    """A user who has a wheel, built as the page says."""
    user = User(tmp_path_factory.mktemp("user"))
    shutil.copy(ROOT / "constraints.txt", user.home)
    clone = user.home / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    user.run(f"cd clone && {COMMANDS['uv build'].replace('uv build', 'uv build --build-constraints constraints.txt')}")
    (clone / "dist").rename(user.home / "dist")
    shutil.rmtree(clone)
    assert [path.name for path in (user.home / "dist").glob("*.whl")] == [
        f"trio_pool_serve-{trio_pool_serve.__version__}-py3-none-any.whl"
    ]
    return user


@pytest.mark.slow
def test_the_wheel_runs_without_being_installed(user: User, minilm: Path):
    command = COMMANDS["uvx"].replace("serve path/or/hub-id", f"check {minilm} --no-measure --json")
    assert json.loads(user.run(command))["backend"] in ("openvino", "torch")
    user.assert_has_torch_for_cpus()


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["uv tool", "pipx"])
def test_the_command_is_installed_for_a_user(user: User, tool: str):
    if tool == "pipx":
        user.run("uv venv --quiet pipx && uv pip install --quiet --python pipx pipx")
    user.run(COMMANDS[tool].replace("pipx install", "pipx/bin/pipx install"))
    assert user.run(".local/bin/trio-pool-serve --version").strip() == trio_pool_serve.__version__
    user.assert_has_torch_for_cpus()
    shutil.rmtree(user.home / ".local")
