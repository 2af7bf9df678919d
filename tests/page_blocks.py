"""The fenced blocks of a page, in order, for tests that do what the page tells its readers to do."""

import re
from pathlib import Path

from attrs import frozen


@frozen
class Block:
    language: str
    text: str
    before: str
    """The last line above it that is not empty."""

    @property
    def file_name(self) -> str | None:
        """The file that the line above it names, if there is one: ``Put this into `folder/name.py`:``."""
        named = re.search(r"`([\w/]+\.py)`:$", self.before)
        return named and named[1]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page that have a language."""
    found = re.finditer(r"^```(\w+)\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    text = page.read_text()
    return [Block(each[1], each[2], text[: each.start()].rstrip().rpartition("\n")[2]) for each in found]
