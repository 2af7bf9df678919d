"""Imports go down only."""

import ast
import itertools
import runpy
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
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
    {"checking", "python_api", "server"},
    {"bulk"},
    {"command_line", "load", "ray_data"},
    {"cli"},
    {"__main__", "asgi"},
]

NEIGHBOURS_THAT_NEVER_MEET = {(a, b) for a in FLOORS[5] for b in FLOORS[5] if a != b}

LONGER_THAN_400_LINES: set[str] = set()
"""Reviewed exceptions, by path in the package: one noun that would be harder to read in two files."""

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


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module or "")
    return found


SOURCES = sorted(PACKAGE.rglob("*.py"))
PICTURES = runpy.run_path(str(PACKAGE.parent / "docs/generate_pictures.py"))


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
            down = floor_of(target) < floor_of(package) or target == package
            if not down or (package, target) in NEIGHBOURS_THAT_NEVER_MEET:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


def test_the_page_on_structure_lists_every_package_on_its_floor():
    """Some of the page's floors are several of ``FLOORS``."""
    listed = dict(PICTURES["floors"]())
    packages = [sorted(packages - {"", "__main__"}) for packages in FLOORS]
    assert sorted(listed) == sorted(itertools.chain(*packages))
    for lower, higher in itertools.pairwise(filter(None, packages)):
        assert max(listed[package] for package in lower) <= min(listed[package] for package in higher)


@pytest.mark.parametrize("name", ["structure", "peers"])
def test_a_picture_of_the_documentation_is_what_its_script_draws(name: str):
    drawn = PICTURES[f"{name}_picture"]()
    assert (PACKAGE.parent / f"docs/pictures/{name}.svg").read_text() == drawn, "run docs/generate_pictures.py"


def test_no_modules_import_each_other_in_a_circle():
    """Nor for type checkers, nor inside functions, whose imports are needed later or for some commands only."""
    modules = {
        ".".join(("trio_pool_serve", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in SOURCES
    }
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    imports = {
        name: {full if full in modules else module for module, full in names_in(path) if module in modules}
        for name, path in modules.items()
    }
    del imports["trio_pool_serve"]  # it imports the public names only when they are used
    TopologicalSorter(imports).prepare()  # raises CycleError


def names_in(path: Path, *, in_functions: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the module of each import, and the name with what is imported from it."""
    nodes: list[ast.AST] = [tree_of(path)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, alias.name) for alias in node.names)
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)


def test_only_runner_and_models_import_torch_at_module_level():
    importers = {
        package_of(path)
        for path in SOURCES
        for name, _ in names_in(path, in_functions=False)
        if name.partition(".")[0] in {"torch", "transformers"}
    }
    assert importers == MAY_IMPORT_TORCH


def test_no_module_outside_models_knows_a_kind():
    kinds = {path.name for path in (PACKAGE / "models").iterdir() if (path / "loading.py").is_file()}
    assert len(kinds) == 12
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in SOURCES
        if package_of(path) != "models" or path.relative_to(PACKAGE).parts[1] in {"files", "loading"}
        for name in imports_of(path)
        if name.startswith("trio_pool_serve.models.") and name.split(".")[2] in kinds
    ]
    assert not wrong


def test_files_are_small_and_the_root_is_short():
    longer = {str(path.relative_to(PACKAGE)) for path in SOURCES if len(path.read_text().splitlines()) > 400}
    assert longer == LONGER_THAN_400_LINES
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
