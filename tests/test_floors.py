"""Imports go down only."""

import ast
from pathlib import Path

import trio_pool_serve

PACKAGE = Path(trio_pool_serve.__file__).parent

FLOORS = [
    {
        "",
        "dedicated_thread",
        "errors",
        "framed_stream",
        "idle_timer",
        "openmp",
        "priority",
        "prompts",
        "types",
        "without_torch",
    },
    {"config"},
    {"child_process", "offload", "worker_processes"},
    {"telemetry", "model_folder", "model_hub", "containment"},
    {"runner"},
    {"rendering", "engine"},
    {"tasks"},
    {"service"},
    {"api"},
    {"app"},
    {"__main__", "api_process", "api_workers", "asgi", "cli", "engine_process", "launcher", "listener"},
]

NEIGHBOURS_THAT_NEVER_MEET = [("rendering", "engine"), ("engine", "rendering")]

MAY_IMPORT_TORCH = {"runner"}


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def floor_of(room: str) -> int:
    (floor,) = (number for number, rooms in enumerate(FLOORS) if room in rooms)
    return floor


def imports_of(path: Path, *, module_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = ast.iter_child_nodes(tree) if module_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module or "")
    return found


SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_every_import_goes_to_the_same_room_or_a_lower_floor():
    wrong = []
    for path in SOURCES:
        if path == PACKAGE / "__init__.py":
            continue  # it imports the public names only when they are used: tests/test_packaging.py
        room = room_of(path)
        for name in imports_of(path):
            package, _, rest = name.partition(".")
            if package != "trio_pool_serve":
                continue
            target = rest.partition(".")[0]
            entry_floor = floor_of(room) == len(FLOORS) - 1
            down = floor_of(target) < floor_of(room) or target == room or entry_floor
            if not down or (room, target) in NEIGHBOURS_THAT_NEVER_MEET:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert not wrong


def test_only_the_runner_imports_torch_at_module_level():
    importers = {
        room_of(path)
        for path in SOURCES
        for name in imports_of(path, module_level_only=True)
        if name.partition(".")[0] in {"torch", "transformers"}
    }
    assert importers == MAY_IMPORT_TORCH


def test_the_api_knows_nothing_of_models_and_the_tasks_nothing_of_http():
    for path in SOURCES:
        packages = {name.partition(".")[0] for name in imports_of(path)}
        if room_of(path) == "api":
            assert not packages & {"torch", "transformers", "tokenizers"}, path
        if room_of(path) in {"tasks", "engine", "rendering", "runner"}:
            assert not packages & {"quart", "quart_trio", "hypercorn", "werkzeug"}, path


def test_nothing_runs_outside_a_nursery_of_our_own():
    """Quart's background tasks, its nursery and its serving generators break structure when they fail."""
    forbidden = {"while_serving", "before_serving", "add_background_task", "spawn_system_task"}
    for path in SOURCES:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert not used & forbidden, path
        assert ("Thread" in used) == (room_of(path) == "dedicated_thread"), path
