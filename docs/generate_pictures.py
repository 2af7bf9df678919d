"""Draws the pictures of README.md and structure.md, as SVG: ``python docs/generate_pictures.py``.

``peers.svg`` shows the results in ``benchmarks/results/peers.json``. ``structure.svg`` shows the packages on the floors
that the table in structure.md lists, and what their modules import. Both follow the reader's light or dark colours.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trio_pool_serve"
PICTURES = ROOT / "docs" / "pictures"

STYLE = """
  svg { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
  text { fill: #1f2328; }
  .card { fill: #ffffff; stroke: #d0d7de; }
  .title { font-size: 15px; font-weight: 600; }
  .note { font-size: 12px; fill: #59636e; }
  .grid { stroke: #d0d7de; }
  .ours { fill: #1f6feb; } .vllm { fill: #9a6700; } .infinity { fill: #8c959f; }
  .box { fill: #ddf4ff; stroke: #54aeff; } .base { fill: #f6f8fa; stroke: #afb8c1; }
  .name { font: 600 13px ui-monospace, Menlo, Consolas, monospace; text-anchor: middle; }
  .role { font-size: 11px; fill: #59636e; text-anchor: middle; }
  .edge { fill: none; stroke: #6e7781; stroke-width: 1.3; }
  .head { fill: #6e7781; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .card { fill: #0d1117; stroke: #30363d; }
    .note, .role { fill: #9198a1; }
    .grid { stroke: #30363d; }
    .ours { fill: #4493f8; } .vllm { fill: #d29922; } .infinity { fill: #6e7681; }
    .box { fill: #0c2d5e; stroke: #1f6feb; } .base { fill: #161b22; stroke: #484f58; }
    .edge { stroke: #8b949e; } .head { fill: #8b949e; }
  }
"""


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """Return a picture: a card with a title for screen readers, and the parts on it."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return one line of text."""
    attributes = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{attributes} text-anchor="{anchor}">{words}</text>'


NAMES = {"ours": "trio_pool_serve", "vllm": "vLLM 0.32", "infinity": "infinity"}
PANELS = (
    ("requests_per_s", "Requests per second", "more is better"),
    ("server_cpu_ms", "CPU time per request, ms", "less is better"),
)
BAR, GAP, LONGEST = 15, 16, 270


def peers_picture() -> str:
    """Return the comparison with other servers, of the loads with one text per request."""
    results = json.loads((ROOT / "benchmarks/results/peers.json").read_text())
    loads = [load for load in results["loads"] if load["batch"] == 1]
    clients = sorted({load["clients"] for load in loads})
    values = {
        (load["server"], load["clients"], field): median(each[field] for each in load["rounds"])
        for load in loads
        for field, _, _ in PANELS
    }
    group = len(NAMES) * BAR + GAP
    bottom = 76 + group * len(clients)
    return svg(
        *(860, bottom + 48),
        "Requests per second and CPU time per request of trio_pool_serve, vLLM and infinity",
        [
            *_legend(),
            *(
                part
                for number, (field, title, better) in enumerate(PANELS)
                for part in _panel(110 + 390 * number, title, better, field, clients, values)
            ),
            *(
                text(100, 99 + group * place, f"{number} client{'s' * (number > 1)}", anchor="end")
                for place, number in enumerate(clients)
            ),
            text(20, bottom + 14, _caption(results), "note"),
            text(20, bottom + 32, "vLLM in bfloat16, infinity in float32, its default. TEI was not measured.", "note"),
        ],
    )


def _caption(results: Mapping[str, Any]) -> str:
    settings, machine = results["settings"], results["machine"]
    return (
        f"{settings['model']}, one text of {settings['tokens'][0]} tokens per request, {machine['cores']} cores of an "
        f"Intel Xeon with AMX, no GPU; medians of {settings['rounds']} rounds, {machine['measured'][:10]}."
    )


def _legend() -> Iterator[str]:
    x = 110
    for kind, name in NAMES.items():
        yield f'<rect class="{kind}" x="{x}" y="18" width="12" height="12" rx="2"/>'
        yield text(x + 18, 29, name)
        x += 60 + 7 * len(name)


def _panel(
    left: int, title: str, better: str, field: str, clients: list[int], values: Mapping[tuple[str, int, str], float]
) -> Iterator[str]:
    yield text(left, 62, f'{title} <tspan class="note" font-weight="400">({better})</tspan>', "title")
    scale = LONGEST / max(value for (*_, of), value in values.items() if of == field)
    for place, number in enumerate(clients):
        y = 76 + place * (len(NAMES) * BAR + GAP)
        for server in NAMES:
            value = values[server, number, field]
            yield f'<rect class="{server}" x="{left}" y="{y}" width="{value * scale:.1f}" height="{BAR - 2}" rx="2"/>'
            yield text(left + value * scale + 6, y + 11, f"{value:.0f}" if value >= 30 else f"{value:.1f}", "note")
            y += BAR


BOXES = {
    "asgi": (2.9, "app for plain hypercorn"),
    "cli": (2.9, "the command"),
    "ray_data": (0.5, "classes for Ray Data"),
    "load": (1.5, "load generator: bench"),
    "command_line": (2.5, "flags and commands"),
    "bulk": (1.0, "commands for files"),
    "server": (1.5, "processes and connections"),
    "python_api": (2.5, "models without HTTP"),
    "checking": (3.5, "the command check"),
    "app": (1.5, "settings in, ASGI app out"),
    "process_setup": (2.9, "where models compute"),
    "api": (1.5, "HTTP, routes, dialects"),
    "service": (2.0, "all behind the routes"),
    "tasks": (0.5, "jobs, fan-out of rows"),
    "serving": (1.5, "which models are loaded"),
    "runs": (3.5, "tables, files, batches"),
    "models": (1.38, "one folder per kind of model"),
    "rendering": (0.46, "prompts to token ids"),
    "engine": (1.38, "queue, batches, devices"),
    "runner": (2.3, "forward passes"),
    "telemetry": (1.38, "metrics, logs, traces"),
    "storage": (2.58, "database, caches"),
    "access": (3.5, "API keys and limits"),
    "threads": (1.0, "blocking work"),
    "processes": (3.0, "child processes"),
    "config": (2.0, "settings"),
    "errors": (0.67, "what can fail"),
    "prompts": (2.0, "what clients send"),
    "types": (3.33, "what packages exchange"),
}
"""The middle of each package's box, in columns, and what is in the package."""

FOUNDATION = 3
"""Packages on lower floors than this are imported from everywhere: the picture shows no arrows to them."""

COLUMN, ROW, WIDTH, HEIGHT = 210, 62, 190, 42


def structure_picture() -> str:
    """Return the packages on their floors, with arrows for imports that do not follow from other arrows."""
    floor_of = dict(floors())
    imports = imports_between_packages(floor_of)
    rows = sorted(set(floor_of.values()), reverse=True)
    top = {package: 22 + ROW * rows.index(floor) for package, floor in floor_of.items()}
    middle = {package: 24 + COLUMN * BOXES[package][0] for package in floor_of}
    shown = [
        (package, target)
        for package, targets in _not_implied(imports).items()
        for target in sorted(targets)
        if floor_of[target] >= FOUNDATION
    ]
    width, height = 48 + 4 * COLUMN, 22 + ROW * len(rows) + 30
    boxes: list[str] = []
    for package, floor in floor_of.items():
        alike = sum(its == floor for its in floor_of.values())
        wide = WIDTH if floor >= FOUNDATION else COLUMN * 4 / alike - (COLUMN - WIDTH)
        boxes += _box(package, middle[package], top[package], wide, "box" if floor >= FOUNDATION else "base")
    head = '<path class="head" d="M0,0 L7,3.5 L0,7 z"/>'
    return svg(
        *(width, height),
        "The packages of trio_pool_serve, each above the packages that it imports",
        [
            f'<marker id="head" markerWidth="7" markerHeight="7" refX="7" refY="3.5" orient="auto">{head}</marker>',
            *(_arrow(package, target, middle, top) for package, target in shown),
            *boxes,
            text(34, height - 22, "Arrows are imports. An import that follows from other arrows is not shown,", "note"),
            text(34, height - 8, "nor is an import of a grey package: every floor uses them.", "note"),
        ],
    )


def _box(package: str, x: float, y: float, wide: float, kind: str) -> Iterator[str]:
    yield f'<rect class="{kind}" x="{x - wide / 2:g}" y="{y}" width="{wide:g}" height="{HEIGHT}" rx="6"/>'
    yield text(x, y + 18, package, "name", "middle")
    yield text(x, y + 34, BOXES[package][1], "role", "middle")


def _arrow(package: str, target: str, middle: Mapping[str, float], top: Mapping[str, float]) -> str:
    x, y, end_x, end_y = middle[package], top[package], middle[target], top[target]
    if y == end_y:  # neighbours
        side = WIDTH / 2 if end_x > x else -WIDTH / 2
        path = f"M{x + side:g},{y + HEIGHT / 2:g} H{end_x - side:g}"
    else:
        y += HEIGHT
        beside = max(-COLUMN, min(COLUMN, end_x - x))
        near = (x + 0.3 * beside, end_x - 0.2 * beside)
        path = f"M{near[0]:g},{y:g} C{near[0]:g},{y + 24:g} {near[1]:g},{end_y - 24:g} {near[1]:g},{end_y:g}"
    return f'<path class="edge" d="{path}" marker-end="url(#head)"/>'


def floors() -> Iterator[tuple[str, int]]:
    """Yield each package of the table in structure.md with its floor."""
    for floor, packages in re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "docs/structure.md").read_text(), re.M):
        for name in re.findall(r"`(\w+)(?:/|\.py)`", packages):
            yield name, int(floor)


def imports_between_packages(packages: Iterable[str]) -> dict[str, set[str]]:
    """Return which of the packages each of them imports, anywhere in its modules."""
    known, found = {*packages}, {package: set[str]() for package in packages}
    for package in known:
        folder = PACKAGE / package
        for module in folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]:
            for node in ast.walk(ast.parse(module.read_text())):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                found[package] |= {name.split(".")[1] for name in names if name.startswith("trio_pool_serve.")}
    return {package: (targets & known) - {package} for package, targets in found.items()}


def _not_implied(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Leave out each import that a chain of other imports contains."""

    def below(package: str) -> set[str]:
        return imports[package].union(*(below(target) for target in imports[package]))

    return {
        package: {target for target in targets if not any(target in below(other) for other in targets)}
        for package, targets in imports.items()
    }


if __name__ == "__main__":
    (PICTURES / "peers.svg").write_text(peers_picture())
    (PICTURES / "structure.svg").write_text(structure_picture())
