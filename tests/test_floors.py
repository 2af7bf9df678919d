"""Imports go down only."""

import ast
from functools import cache
from pathlib import Path

import pytest

import trio_pool_serve

pytestmark = pytest.mark.unit

PACKAGE = Path(trio_pool_serve.__file__).parent

FLOORS = [
    {"", "errors", "prompts", "types"},
    {"config"},
    {"threads"},
    {"processes"},
    {"access", "storage", "telemetry"},
    {"engine", "rendering", "runner"},
    {"models"},
    {"tasks"},
    {"runs"},
    {"serving"},
    {"service"},
    {"api"},
    {"process_setup"},
    {"app"},
    {"__main__", "asgi", "bulk", "checking", "cli", "command_line", "load", "python_api", "ray_data", "server"},
]

NEIGHBOURS_THAT_NEVER_MEET = {(a, b) for a in FLOORS[5] for b in FLOORS[5] if a != b}

MAY_IMPORT_TORCH = {"models", "runner"}


def package_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def floor_of(package: str) -> int:
    (floor,) = (number for number, packages in enumerate(FLOORS) if package in packages)
    return floor


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path, *, module_level_only: bool = False) -> set[str]:
    nodes = ast.iter_child_nodes(tree_of(path)) if module_level_only else ast.walk(tree_of(path))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module or "")
    return found


SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_every_import_goes_to_the_same_package_or_a_lower_floor():
    wrong = []
    for path in SOURCES:
        if path == PACKAGE / "__init__.py":
            continue  # it imports the public names only when they are used: tests/test_packaging.py
        package = package_of(path)
        for name in imports_of(path):
            top, _, rest = name.partition(".")
            if top != "trio_pool_serve":
                continue
            target = rest.partition(".")[0]
            entry_floor = floor_of(package) == len(FLOORS) - 1
            down = floor_of(target) < floor_of(package) or target == package or entry_floor
            if not down or (package, target) in NEIGHBOURS_THAT_NEVER_MEET:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


def test_only_runner_and_models_import_torch_at_module_level():
    importers = {
        package_of(path)
        for path in SOURCES
        for name in imports_of(path, module_level_only=True)
        if name.partition(".")[0] in {"torch", "transformers"}
    }
    assert importers == MAY_IMPORT_TORCH


def test_no_module_outside_models_knows_a_kind():
    kinds = {path.name for path in (PACKAGE / "models").iterdir() if (path / "spec.py").is_file()}
    assert len(kinds) == 10
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in SOURCES
        if package_of(path) != "models" or path.relative_to(PACKAGE).parts[1] in {"files", "loading"}
        for name in imports_of(path)
        if name.startswith("trio_pool_serve.models.") and name.split(".")[2] in kinds
    ]
    assert not wrong


def test_files_are_small_and_the_root_is_short():
    assert [path for path in SOURCES if len(path.read_text().splitlines()) > 400] == []
    assert len(list(PACKAGE.glob("*.py"))) <= 11


def test_a_file_name_occurs_twice_only_as_the_same_part_of_siblings():
    by_name: dict[str, set[Path]] = {}
    for path in SOURCES:
        if path.name != "__init__.py":
            by_name.setdefault(path.name, set()).add(path.parent.parent)
    assert {name: parents for name, parents in by_name.items() if len(parents) > 1} == {}


def test_the_api_knows_nothing_of_models_and_the_tasks_nothing_of_http():
    for path in SOURCES:
        packages = {name.partition(".")[0] for name in imports_of(path)}
        if package_of(path) == "api":
            assert not packages & {"torch", "transformers", "tokenizers"}, path
        if package_of(path) in {"tasks", "engine", "rendering", "runner"}:
            assert not packages & {"quart", "quart_trio", "hypercorn", "werkzeug"}, path


def test_nothing_runs_outside_a_nursery_of_our_own():
    """Quart's background tasks, its nursery and its serving generators break structure when they fail."""
    forbidden = {"while_serving", "before_serving", "add_background_task", "spawn_system_task"}
    for path in SOURCES:
        nodes = list(ast.walk(tree_of(path)))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert not used & forbidden, path
        assert ("Thread" in used) == (path.name == "dedicated_threads.py"), path
