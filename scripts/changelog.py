"""Prints the version to release: that of the package and of the changelog's latest entry, which must agree.

``--allow-unreleased`` permits changes under "Unreleased"; ``--notes`` prints the version's entry as well.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^## (?:Unreleased|(?P<version>\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d)$", re.M)


def package_version() -> str:
    """Return the version in the package's source, where hatchling reads it too."""
    source = (ROOT / "trio_pool_serve" / "__init__.py").read_text()
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, flags=re.M)
    return version


def entries(changelog: str) -> list[tuple[str | None, str]]:
    """Return version and text of each entry, latest first; "Unreleased" has no version.

    Raises ``ValueError`` for a second-level heading of another form.
    """
    wrong = [line for line in re.findall(r"^## .*$", changelog, flags=re.M) if not HEADING.fullmatch(line)]
    if wrong:
        raise ValueError(f"CHANGELOG.md: not `## VERSION - DATE`: {wrong[0]!r}")
    found = list(HEADING.finditer(changelog))
    ends = [heading.start() for heading in found[1:]] + [len(changelog)]
    return [
        (heading["version"], changelog[heading.end() : end].strip()) for heading, end in zip(found, ends, strict=True)
    ]


def release(changelog: str, version: str, *, allow_unreleased: bool) -> str:
    """Return the text of the entry to release. Raises ``ValueError`` if the changelog is not ready for it."""
    found = entries(changelog)
    if len(found) < 2 or found[0][0] is not None:
        raise ValueError('CHANGELOG.md does not begin with "Unreleased" and the latest version.')
    (_, unreleased), (latest, text) = found[:2]
    if latest != version:
        raise ValueError(f"The latest entry of CHANGELOG.md is {latest}, but the package's version is {version}.")
    if unreleased and not allow_unreleased:
        raise ValueError('CHANGELOG.md has changes under "Unreleased": move them to the version they are released in.')
    return text


if __name__ == "__main__":
    options = set(sys.argv[1:])
    version = package_version()
    try:
        notes = release((ROOT / "CHANGELOG.md").read_text(), version, allow_unreleased="--allow-unreleased" in options)
    except ValueError as error:
        sys.exit(f"scripts/release: {error}")
    print(version if "--notes" not in options else f"trio_pool_serve {version}\n\n{notes}")
