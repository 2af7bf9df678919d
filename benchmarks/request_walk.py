"""Which functions does one request call? Counts for an embeddings request with two texts on an open connection.

Everything runs in this process: the listener, the model, and the client. Functions of other packages are not counted;
between two of ours, they do not end a call. Resuming a coroutine is not a call, and a comprehension is part of its
function, as it is for Python from 3.12 on.

    python -m benchmarks.request_walk            # calls, files, returns to a file, climbs to a higher floor
    python -m benchmarks.request_walk --calls    # and each function with its number of calls
"""

import dis
import json
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import cyclopts
import trio
from attrs import define, field, frozen
from cyclopts import Parameter

import trio_pool_serve
from benchmarks.model import MODEL_PATH
from benchmarks.report import RESULTS, Report, print_table
from tests.test_floors import floor_of, package_of
from trio_pool_serve.config import Config
from trio_pool_serve.process_setup import open_service
from trio_pool_serve.server.listener import serve_listeners

PACKAGE = f"{Path(trio_pool_serve.__file__).parent}/"

WARM_UP_REQUESTS = 20

SETTLE_S = 0.05
"""After a response, for what the server still does."""

BODY = json.dumps({"input": ["first", "second"], "encoding_format": "base64"}).encode()

REQUEST = b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
REQUEST += b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY

RESUME = dis.opmap["RESUME"]

COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}


@define
class Walk:
    """The calls of functions of the package, each with its caller: the nearest function of the package below it."""

    calls: list[tuple[CodeType | None, CodeType]] = field(init=False, factory=list)
    is_recording: bool = field(default=False, init=False)

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call: the function that ``sys.setprofile`` calls."""
        if event != "call" or not self.is_recording or not is_counted(frame):
            return
        code, at = frame.f_code, max(0, frame.f_lasti)
        if code.co_code[at] == RESUME and code.co_code[at + 1] & 3:
            return  # a generator or coroutine continues
        caller = frame.f_back
        while caller is not None and not is_counted(caller):
            caller = caller.f_back
        self.calls.append((None if caller is None else caller.f_code, code))

    def counts(self) -> dict[str, int]:
        """Return the numbers of the walk."""
        files = [code.co_filename for _, code in self.calls]
        moves = [
            code.co_filename for caller, code in self.calls if caller is None or caller.co_filename != code.co_filename
        ]
        return {
            "calls": len(self.calls),
            "into another file": len(moves),
            "files": len(set(files)),
            "returns to a file": len(moves) - len(set(moves)),
            "climbs": len(self.climbs()),
        }

    def climbs(self) -> list[str]:
        """Return the calls of functions on a higher floor than their caller."""
        return [
            f"{name_of(caller)} → {name_of(code)}"
            for caller, code in self.calls
            if caller is not None and floor(caller) < floor(code)
        ]

    def packages(self) -> Counter[str]:
        """Return the number of calls of functions of each package."""
        return Counter(package_of(Path(code.co_filename)) for _, code in self.calls)


def is_counted(frame: FrameType) -> bool:
    """Return whether a frame is a function of the package."""
    return frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name not in COMPREHENSIONS


def floor(code: CodeType) -> int:
    """Return the floor of a function's package."""
    return floor_of(package_of(Path(code.co_filename)))


def name_of(code: CodeType) -> str:
    """Return a function's file and name."""
    return f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}"


async def record() -> Walk:
    """Serve the packaged model, and return the walk of one request. Cancellation: at once."""
    walk = Walk()
    threading.setprofile(walk.profile)
    sys.setprofile(walk.profile)
    async with open_service(Config(models=(MODEL_PATH,))) as service, trio.open_nursery() as nursery:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)  # noqa: FBT003
            nursery.start_soon(serve_listeners, service, listening, trio.Event(), None)
            async with await trio.open_tcp_stream(*listening.getsockname()) as stream:
                for number in range(WARM_UP_REQUESTS + 1):
                    walk.is_recording = number == WARM_UP_REQUESTS
                    await stream.send_all(REQUEST)
                    received = b""
                    while b'"usage"' not in received:
                        received += await stream.receive_some(2**16)
                    await trio.sleep(SETTLE_S)
            walk.is_recording = False
            nursery.cancel_scope.cancel(reason="the request is answered")
    sys.setprofile(None)
    return walk


@Parameter(name="*")
@frozen(kw_only=True)
class Settings:
    """The settings. ``calls``: print each function and its number of calls as well."""

    calls: Annotated[bool, Parameter(negative=())] = False
    output_dir: Path = RESULTS


def main(settings: Settings = Settings()) -> None:
    """Count the calls of one request, and print which of them go to a higher floor."""
    report = Report("request_walk", settings)
    walk = trio.run(record)
    counts, packages = walk.counts(), walk.packages().most_common()
    print_table("Calls of one request", ["", "number"], [[name, str(count)] for name, count in counts.items()])
    print_table("Calls by package", ["package", "calls"], [[name or "top level", str(each)] for name, each in packages])
    print_table("Climbs", ["from", "to"], [each.split(" → ") for each in walk.climbs()])
    functions = Counter(name_of(code) for _, code in walk.calls)
    if settings.calls:
        print_table("Functions", ["function", "calls"], [[name, str(n)] for name, n in functions.most_common()])
    report.write(counts=counts, climbs=walk.climbs(), functions=functions)


if __name__ == "__main__":
    cyclopts.run(main)
