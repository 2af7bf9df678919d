"""A server for files over HTTP: run with a folder, it prints its port, and appends to ``requests`` what it is asked.

The first request of each method is answered with 503. It takes files with a ``Content-Length`` only, as object stores
do, and paths below ``/forbidden`` not at all.
"""

import sys
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

MODIFIED = "Wed, 21 Oct 2015 07:28:00 GMT"


class Handler(BaseHTTPRequestHandler):
    folder: Path
    seen: ClassVar[Counter[str]] = Counter()

    def log_message(self, *_: Any) -> None:
        pass

    def _path(self) -> Path:
        return self.folder / Path(urlsplit(self.path).path).name

    def _refuse(self) -> bool:
        with (self.folder / "requests").open("a") as file:
            file.write(f"{self.command} {self.path}\n")
        self.seen[self.command] += 1
        status = 403 if self.path.startswith("/forbidden") else 503 if self.seen[self.command] == 1 else 0
        if self.command == "PUT" and not status and "content-length" not in self.headers:
            status = 411
        if status:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self._answer(status, b"")
        return bool(status)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("last-modified", MODIFIED)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if not self._refuse():
            self._answer(200, self._path().read_bytes())

    def do_PUT(self) -> None:
        if not self._refuse():
            self._path().write_bytes(self.rfile.read(int(self.headers["content-length"])))
            self._answer(201, b"")


if __name__ == "__main__":
    Handler.folder = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)  # noqa: T201  (the output of the program)
    server.serve_forever()
