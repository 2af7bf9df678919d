"""Servers of HTTP in a thread, and one for files, as object stores are."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@contextmanager
def served_by(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve until the block is left; yield the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class FileStore(BaseHTTPRequestHandler):
    """Serves the files of a folder, and notes in ``asked`` what it is asked.

    The first request of each method is answered with 503. It takes files with a ``Content-Length`` only, and paths
    below ``/forbidden`` not at all.
    """

    folder: Path
    asked: list[str]

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("last-modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        path, sent = self.folder / Path(urlsplit(self.path).path).name, self.headers.get("content-length")
        content = self.rfile.read(int(sent or 0))
        if self.path.startswith("/forbidden"):
            self._answer(403, b"")
        elif Counter(line.split()[0] for line in self.asked)[self.command] == 1:
            self._answer(503, b"")
        elif self.command == "GET":
            self._answer(200, path.read_bytes())
        elif sent is None:
            self._answer(411, b"")
        else:
            path.write_bytes(content)
            self._answer(201, b"")

    do_PUT = do_GET  # noqa: N815
