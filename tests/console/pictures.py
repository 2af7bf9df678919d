"""Pictures of the console's views: ``python -m tests.console.pictures URL FOLDER`` takes those of docs/console.md.

The server at URL should have the models of ``tests/console/conftest.py`` by their names there, and some requests to do.
"""

import re
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.console.visit import Visit
from tests.debian_programs import CHROMIUM_FLAGS, debian_program

VIEWS = {
    "live": {},
    "similarity": {},
    "rerank": {"Model": "minilm"},
    "classify": {"Model": "classifier", "Texts, one per line": "a task is here\nis a task"},
    "token-classes": {"Model": "tagger", "Text": "A task met a task."},
    "late-interaction": {"Model": "minilm"},
    "sparse": {"Text": "the task is here"},
}
"""By tab: what is filled in; the tiny models of the tests have short inputs."""


def open_view(page: Page, view: str) -> None:
    name = re.compile(f"^{view.replace('-', ' ')}$", re.IGNORECASE)
    page.get_by_role("tab", name=name).click()


def fill(page: Page, fields: dict[str, str]) -> None:
    for label, value in fields.items():
        control = page.get_by_label(label, exact=True).first
        if control.evaluate("element => element.tagName") == "SELECT":
            control.select_option(value)
        else:
            control.fill(value)


def run(page: Page) -> None:
    page.locator("main form button.primary").click()
    expect(page.locator("main form [role=status].readout")).to_contain_text("Done")


WATCHED_MS = 60_000
"""How long the live view is watched before its picture is taken."""


def take_pictures(browser: Browser, url: str, folder: Path) -> None:
    """Take a picture of each view in each theme."""
    for scheme in ("light", "dark"):
        with Visit(browser, url, color_scheme=scheme) as page:
            for view, fields in VIEWS.items():
                open_view(page, view)
                if view == "live":
                    expect(page.locator(".chart canvas").last).to_be_visible()
                    page.wait_for_timeout(WATCHED_MS)
                else:
                    fill(page, fields)
                    run(page)
                if view == "late-interaction":
                    page.locator("button.token").nth(2).hover()
                path = folder / f"console-{view}-{scheme}.png"
                page.screenshot(path=path, full_page=True)
                # A palette is enough for a page's colours, and a quarter of the bytes.
                Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=debian_program("chromium"), args=CHROMIUM_FLAGS)
        take_pictures(browser, sys.argv[1], Path(sys.argv[2]))
        browser.close()
