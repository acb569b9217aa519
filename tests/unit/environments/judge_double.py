"""An OpenAI-compatible endpoint in miniature: each request is answered by the next of a list of answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Bytes at a time, 20 times a second, of an answer with X-Drips. The text of X-Drips-First comes byte by byte.
DRIP = 4


@dataclass
class Double:
    answers: list[
        Any
    ]  # a reply, the whole answer, (status, text, headers), seconds to wait, or what makes one. Last: again
    url: str = ""
    models: Any = None  # the answer to each GET
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)  # path, body, headers
    under_way: int = 0
    most: int = 0  # in flight at once
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str, dict[str, str]]:
        with self.lock:
            self.asked.append((path, body, headers))
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            given = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        given = given(body) if callable(given) else given
        time.sleep(given if isinstance(given, float) else 0.01)
        with self.lock:
            self.under_way -= 1
        if isinstance(given, tuple):
            return given
        message = {"message": {"content": str(given)}, "finish_reason": "stop"}
        return 200, json.dumps(given if isinstance(given, dict) else {"choices": [message]}), {}


@contextmanager
def judge_double(*answers: Any) -> Iterator[Double]:
    double = Double(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, text, headers = double.answer(self.path, body, dict(self.headers))
            for byte in headers.get("X-Drips-First", ""):  # in place of the status line
                self.wfile.write(byte.encode())
                time.sleep(0.05)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(text.encode())), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            for place in range(0, len(text), DRIP if "X-Drips" in headers else max(1, len(text))):
                time.sleep(0.05 if place else 0.0)
                self.wfile.write(text.encode()[place : place + DRIP] if "X-Drips" in headers else text.encode())

        def do_GET(self) -> None:
            text = json.dumps(double.models).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args: Any) -> None:
            """Nothing."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # more requests arrive at once than the usual 5; some would be reset

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that hung up."""

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        double.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        yield double
        server.shutdown()
