"""A visit of the console in a browser, with everything that must not happen noted."""

from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request

TIMEOUT_MS = 30_000
"""For anything that a page waits for: the machine may be busy with other tests."""


class Visit:
    """A page of its own at ``url`` + ``path``; leaving it fails if its console had errors or it asked other origins.

    ``expected_errors`` are texts of console messages that a test provokes.
    """

    def __init__(self, browser: Browser, url: str, path: str = "/console", *, expected: str = "", **options: Any):
        self._browser, self._url, self._path, self._expected = browser, url, path, expected
        self._options = {"viewport": {"width": 1280, "height": 900}, "accept_downloads": True, **options}
        self.errors: list[str] = []
        self.elsewhere: list[str] = []

    def __enter__(self) -> Page:
        self._context = self._browser.new_context(**self._options)
        page = self._context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", self._note_message)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._note_request)
        page.goto(self._url + self._path)
        return page

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._context.close()
        if exc_value is None:
            assert not self.errors, self.errors
            assert not self.elsewhere, self.elsewhere

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not (self._expected and self._expected in message.text):
            self.errors.append(message.text)

    def _note_request(self, request: Request) -> None:
        scheme, host = urlsplit(request.url)[:2]
        if scheme not in ("data", "blob") and host != urlsplit(self._url).netloc:
            self.elsewhere.append(request.url)
