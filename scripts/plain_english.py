"""Print the sentences of pages, help and messages that match a pattern which readers stumble over.

``python scripts/plain_english.py [PATH…]`` prints each match with its place, and their number. It reads the Markdown
pages, where the help of commands and settings stands as well, and the strings of the package that are not docstrings.
Code and records of the past (results, the changelog) are left out. The patterns find candidates: not every match is a
bad sentence.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "docs/integrations/*.md", "benchmarks/README.md")
NOT_READ = {"CHANGELOG.md"}

START = r"(?:^|(?<=[.:;!?|] )|(?<=\*\* ))"
"""Where a sentence begins."""

DONE = "read|made|written|sent|run|wanted|loaded|computed|checked|counted|stopped|started|given|done|kept"
DOCUMENT = "file|page|table|response|answer|body|log|error|document|column|row|list"

PATTERNS = {
    "name the noun": (
        r"\b[Tt]hose\b|\b(the|that) ones? (that|who|which|whose|of|with|in)\b|(?<!\* )\bthat of\b"
        rf"|{START}(What|Who|Whose) [^?.]*(?![^.]*\?)"
        r"|\b(for|of|by|from|to) who(m|ever)?\b|\bwhat is (empty|missing|not)\b"
    ),
    "subject first": (
        rf"{START}(Of|By) (a|an|the|these|all|each|every|several|two) [^.?]*,|, of which\b|{START}To whom\b"
    ),
    "conditions begin with if": (
        rf"{START}(Is|Are|Was|Were|Has|Have|Had|Does|Do|Did|Should|Comes|Ends|Fails|Stops|Dies) "
        r"(it|the|a|an|this|that|there|no|one|all|none|they|its|another|such|some)\b[^?.]*(?=[.:;]|$)"
    ),
    "say who does it": (
        r"\b(has|have|had|having) (the|a|an|its|their|them|it|all|every|each|these) (\S+ ){0,3}?"
        rf"({DONE})\b(?! (by|from))"
    ),
    "show, list, return, contain": (
        rf"FILE (has|have) (?!been)|\b({DOCUMENT}) (has|have) (the|a|an|its|no|all|every|one|rows|two)\b(?! \w+ed\b)"
    ),
    "the usual verbs": (
        r"\b(go|goes|gone|going) on with\b|\bcan be gone\b|\bis warned of\b|\bwarned about of\b|\binsists? on\b"
    ),
    "N, up to N, at least N": (
        r"\b[Ss]o (many|much|few|long)\b(?! (as|that|for))|\bas many as there\b|\bfor so long\b"
    ),
    "one idea a sentence": r"\bof which (nothing|none|all|one|some|only|the)\b|\b(are|is) (yours|its own affair)\b",
    "no test provenance": (
        r"\b(the|these|our|its) tests? (use|uses|run|runs|compare|compares|check|checks|send|sends|start|read)\b"
    ),
    "no riddles": (
        r"\bno one is told\b|\bthe first so\b|\bis one more\b|\bis behind the\b|\bmay have any\b|\beither time\b"
        r"|\btells? (CODE|how|which|what|whether)\b|\bsays? which\b|\bis said (in|by|at)\b|\bas CODE says\b"
        r"|\bcomes? (of|out)\b"
    ),
}


def without_code(text: str) -> str:
    """Replace inline code: files and routes by ``FILE``, everything else by ``CODE``."""
    return re.sub(r"`(/?)[^`]*?(\.(json|toml|md|yaml|txt|log))?`", lambda c: "FILE" if c[1] or c[2] else "CODE", text)


def prose_of(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a page with their first lines: each list item and each table row is one."""
    text = re.sub(r"^ *```.*?^ *```", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.M | re.S)
    first, lines = 1, []
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        if lines and (not line.strip() or re.match(r" *([-*#|]|\d+\.) ?", line)):
            yield first, " ".join(lines)
            lines = []
        if line.strip():
            if not lines:
                first = number
            lines.append(line.strip())


def strings_of(module: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module, without docstrings; values in f-strings become ``CODE``."""
    tree = ast.parse(module.read_text())
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "CODE" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (statements | parts):
            yield node.lineno, node.value


def texts() -> Iterator[tuple[str, str]]:
    """Yield each text with its place."""
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            if page.name not in NOT_READ:
                for line, text in prose_of(page):
                    yield f"{page.relative_to(ROOT)}:{line}", re.sub(r"\*\*|__", "", without_code(text))
    for module in sorted((ROOT / "trio_pool_serve").rglob("*.py")):
        for line, text in strings_of(module):
            if text.count(" ") >= 2:
                yield f"{module.relative_to(ROOT)}:{line}", without_code(text)


def matches() -> list[tuple[str, str, str]]:
    """Return place, rule and matched words of every match."""
    return [
        (place, rule, text[max(0, found.start() - 30) : found.end() + 40])
        for place, text in texts()
        for rule, pattern in PATTERNS.items()
        for found in re.finditer(pattern, text)
    ]


if __name__ == "__main__":
    chosen = sys.argv[1:]
    found = [each for each in matches() if not chosen or any(each[0].startswith(prefix) for prefix in chosen)]
    for place, rule, words in found:
        print(f"{place}: {rule}: {words}")
    print(len(found), "matches")
