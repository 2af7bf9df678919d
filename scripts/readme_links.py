"""Make README.md's links absolute, for the package index, which shows the page without the files beside it.

``python scripts/readme_links.py README.md`` rewrites the file. In GitHub's workflows the environment contains the
repository's address and the tag. Elsewhere they are not known, and nothing is changed.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path


def with_absolute_links(page: str, environment: Mapping[str, str]) -> str:
    """Return the page with links to files in the repository, at the tag."""
    repository, tag = environment.get("GITHUB_REPOSITORY"), environment.get("GITHUB_REF_NAME")
    if not (repository and tag):
        return page
    address = f"{environment['GITHUB_SERVER_URL']}/{repository}"
    page = re.sub(r"(!\[[^\]]*\]\()(?!\w+:)", rf"\1{address}/raw/{tag}/", page)
    page = re.sub(r"((?<!!)\[[^\]]*\]\()(?=#)", rf"\1{address}/blob/{tag}/README.md", page)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!\w+:)", rf"\1{address}/blob/{tag}/", page)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_absolute_links(file.read_text(), os.environ))
