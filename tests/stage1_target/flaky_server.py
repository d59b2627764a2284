"""A chat-completions server that misbehaves, for test_regenerate.py: a process of its own on a free port of loopback.

    python flaky_server.py FOLDER SECONDS [KEY [MODEL ...]]

Writes its port to FOLDER/port, every request to FOLDER/requests.jsonl, method, path and key to FOLDER/heads.jsonl and the
most requests in flight to FOLDER/most_in_flight. Of conversations asked for the first time, some meet an error, a dropped
or half-sent answer, no JSON, or nothing within the client's patience; words of the last message choose others. SECONDS is
how long an answer takes.
"""

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FOLDER, SECONDS = Path(sys.argv[1]), float(sys.argv[2])
KEY, MODELS = sys.argv[3] if len(sys.argv) > 3 else "", sys.argv[4:] or ["the-model"]
CALL = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
LOCK = threading.Lock()
SEEN: set[str] = set()
IN_FLIGHT = MOST = 0


class Handler(BaseHTTPRequestHandler):
    counted_out = False

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        if self.command == "POST":
            self.answered()
        self.end_headers()
        self.wfile.write(body)

    def is_let_in(self) -> bool:
        """Note the request, and whether it has the key; refused where not."""
        key = self.headers.get("Authorization")
        with LOCK, (FOLDER / "heads.jsonl").open("a") as file:
            file.write(json.dumps({"request": f"{self.command} {self.path}", "key": key}) + "\n")
        if KEY and key != f"Bearer {KEY}":
            self.reply(401, b'{"error": {"message": "not with this key"}}')
            return False
        return True

    def do_GET(self) -> None:
        if self.is_let_in():
            self.reply(200, json.dumps({"data": [{"id": name} for name in MODELS]}).encode())

    def do_POST(self) -> None:
        global IN_FLIGHT, MOST
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with LOCK:
            IN_FLIGHT += 1
            MOST = max(MOST, IN_FLIGHT)
            (FOLDER / "most_in_flight").write_text(str(MOST))
            first = text not in SEEN
            SEEN.add(text)
            with (FOLDER / "requests.jsonl").open("a") as file:
                file.write(text + "\n")
        try:
            if not self.is_let_in():
                return
            self.answer(json.loads(text), hashlib.sha256(text.encode()).digest()[0] % 12 if first else 12, first)
        finally:
            self.answered()

    def answered(self) -> None:
        """Count the request out, once: before the last byte goes, after which the client may ask again."""
        global IN_FLIGHT
        if not self.counted_out:
            self.counted_out = True
            with LOCK:
                IN_FLIGHT -= 1

    def answer(self, request: dict[str, Any], mood: int, first: bool) -> None:
        question = str(request["messages"][-1]["content"])
        words = question.split()
        if words[0] == "status":  # «status 503», at first or always, «after 7» seconds
            if first or "always" in words:
                wait = {"Retry_After": words[-1]} if "after" in words else {}
                self.reply(int(words[1]), b"", **wait)
                return
            mood = 12
        if "refuse" in question:
            status, why = (
                (400, "I will not") if "long" not in question else (413, f"{len(question)} letters are too many")
            )
            self.reply(status, json.dumps({"error": {"message": why}}).encode())
        elif "always broken" in question or mood == 0:
            self.reply(500, b"out of order")
        elif mood == 1:
            self.reply(429, b'{"message": "too many"}', Retry_After="0")
        elif mood == 2:
            self.connection.close()
        elif mood == 3:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"choices"')
        elif mood == 4:
            self.reply(200, b"<html>")
        elif mood == 5:
            self.reply(200, b'{"choices": []}')
        elif mood == 7:
            body: dict[str, Any] = {"choices": [{"message": {"content": "half of it"}, "finish_reason": "abort"}]}
            self.reply(200, json.dumps(body).encode())
        elif mood == 6:
            time.sleep(2.0)
        else:
            time.sleep(SECONDS)
            message: dict[str, Any] = {
                "role": "assistant",
                "content": f"answer to {question}",
                "reasoning_content": None,
            }
            if "think" in question:
                message["reasoning_content"] = "hm"
            if "ponder" in question:
                message["reasoning"] = "well"
            if "call" in question:
                message |= {"content": None, "tool_calls": [CALL]}
            reason = "length" if "endless" in question else "content_filter" if "filtered" in question else "stop"
            reason = words[1] if words[0] == "ends" else reason
            usage = {"completion_tokens": 7}
            body = {"choices": [{"message": message, "finish_reason": reason}], "usage": usage}
            self.reply(200, json.dumps(body).encode())


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client went away


if __name__ == "__main__":
    server = Server(("127.0.0.1", 0), Handler)
    (FOLDER / "port.new").write_text(str(server.server_port))
    (FOLDER / "port.new").rename(FOLDER / "port")
    server.serve_forever()
