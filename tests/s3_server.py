"""A real S3 server in a process of its own on loopback: moto behind a gate that fails requests on demand.

    python s3_server.py

prints its port. A PUT of a JSON object to `/-fault` sets the one fault: `match` is a part of «METHOD /path» of the
requests that it hits, `count` how many of them, and one of these says what happens: `status` with `code`, an S3 error;
`sleep`, seconds before the server gives up; `cut`, how many bytes of it are sent. GET `/-log` returns the requests since the last
such call. moto keeps everything in memory.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

Environment = dict[str, Any]
Start = Callable[[str, list[tuple[str, str]]], Any]


class Gate:
    """The WSGI application around moto's."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._fault: dict[str, Any] = {}
        self._log: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, environment: Environment, start: Start) -> Iterable[bytes]:
        path = environment["PATH_INFO"]
        if path == "/-fault":
            self._fault = json.loads(environment["wsgi.input"].read(int(environment["CONTENT_LENGTH"])))
            return _answer(start, "200 OK", b"")
        if path == "/-log":
            log, self._log = self._log, []
            return _answer(start, "200 OK", json.dumps(log).encode())
        line = f"{environment['REQUEST_METHOD']} {path}"
        ranged = environment.get("HTTP_RANGE", "")
        with self._lock:
            self._log.append(f"{line} {ranged}".rstrip())
            fault = self._fault if self._fault.get("match", "\0") in line and self._fault["count"] > 0 else {}
            if fault:
                self._fault["count"] -= 1
        if "sleep" in fault:
            time.sleep(fault["sleep"])  # and nothing is done: whoever asked may be gone
            return _answer(start, "503 Fault", b"")
        if "status" in fault:
            body = f"<Error><Code>{fault['code']}</Code><Message>{fault.get('message', 'injected')}</Message></Error>"
            environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
            is_head = environment["REQUEST_METHOD"] == "HEAD"
            return _answer(start, f"{fault['status']} Fault", b"" if is_head else body.encode())
        if "cut" in fault:
            whole = b"".join(self._app(environment, lambda *_: None))
            return _answer(start, "206 Partial Content", whole[: fault["cut"]])
        answer: Iterable[bytes] = self._app(environment, start)
        return answer


def _answer(start: Start, status: str, body: bytes) -> list[bytes]:
    start(status, [("Content-Length", str(len(body))), ("Content-Type", "application/xml")])
    return [body]


def main() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, Gate(DomainDispatcherApplication(create_backend_app)), threaded=True)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
