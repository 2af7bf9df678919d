"""Pictures of the console's views, as on docs/console.md."""

from pathlib import Path

import pytest
from PIL import Image

from tests.console.pictures import VIEWS, take_pictures

PAGE = Path(__file__).parents[2] / "docs" / "console.md"


@pytest.mark.slow
def test_a_picture_is_taken_of_every_view_in_both_themes(browser, server_url, tmp_path):
    taken = take_pictures(browser, server_url, tmp_path)
    assert len(taken) == 2 * len(VIEWS)
    for path in taken:
        with Image.open(path) as picture:
            assert picture.width == 1280
            assert len(picture.getcolors()) > 20  # something is on it
    light, dark = (Image.open(tmp_path / f"console-rerank-{scheme}.png").convert("L") for scheme in ("light", "dark"))
    assert light.getpixel((5, 895)) > 200 > 100 > dark.getpixel((5, 895))


def test_the_page_shows_every_view_in_both_themes():
    text = PAGE.read_text()
    for view in VIEWS:
        for scheme in ("light", "dark"):
            name = f"pictures/console-{view}-{scheme}.png"
            assert name in text
            assert (PAGE.parent / name).is_file()
