"""Builds the documentation as a site in build/site: ``python docs/build_site.py``; ``--copy-only`` builds nothing.

Fails if a link between pages, or an anchor, leads nowhere. The pages are copied to build/pages as they lie in the
repository, so that a link leads to the same file on the site as on a code host. Zensical follows no linked folders, and
to read the repository itself it would go through every file of .venv.
"""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build/pages"
"""``docs_dir`` of zensical.toml."""

INCLUDED = (
    *("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    *(
        "docs/*.md",
        "docs/integrations/*.md",
        "docs/*.css",
        "docs/*.service",
        "docs/*.socket",
        "docs/*.conf",
        "docs/*.cfg",
        "docs/*.toml",
    ),
    *("docs/pictures/*.png", "docs/pictures/*.svg"),
    "deploy/monitoring/*.*",
    *("benchmarks/*.md", "benchmarks/results/*.md", "benchmarks/results/*.png", "benchmarks/results/*.json"),
)
"""The pages, and the files to which they link."""


def copy_pages() -> None:
    """Replace what is in ``PAGES`` by the repository's pages."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for pattern in INCLUDED:
        for file in ROOT.glob(pattern):
            target = PAGES / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


if __name__ == "__main__":
    copy_pages()
    if "--copy-only" in sys.argv:
        sys.exit()
    sys.exit(subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT).returncode)
