"""An OpenAI Chat Completions server that answers by a script and keeps what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Message = dict[str, Any]
Answer = tuple[int, str | Message]


class Script:
    """Answers the n-th request with ``decide(n, messages)``: a status, and a reply's text or the whole message."""

    def __init__(self, decide: Callable[[int, list[Message]], Answer], chunked: bool = False) -> None:
        self.decide, self.chunked = decide, chunked
        self.requests: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.keys: set[str] = set()
        self.connections = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/e/7/v1"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                script.connections += 1

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                script.bodies.append(body)
                script.requests.append({"path": self.path, **json.loads(body)})
                script.keys.add(self.headers["Authorization"])
                status, text = script.decide(len(script.bodies), script.requests[-1]["messages"])
                if status == 0:
                    self.close_connection = True
                    return
                message = {"role": "assistant", "content": text} if isinstance(text, str) else text
                script.write(self, status, json.dumps({"choices": [{"message": message}]}).encode())

            def log_message(self, *_: object) -> None:
                """Tests do not chat."""

        return Handler

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def write(self, handler: BaseHTTPRequestHandler, status: int, answer: bytes) -> None:
        handler.send_response(status)
        if self.chunked:
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            for part in (answer[:7], answer[7:]):
                handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            handler.wfile.write(b"0\r\n\r\n")
        else:
            handler.send_header("Content-Length", str(len(answer)))
            handler.end_headers()
            handler.wfile.write(answer)
