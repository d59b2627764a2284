"""A client for chat completions of any OpenAI-compatible server (vLLM, SGLang, llama.cpp), on http.client alone.

What passes is waited for: dropped connections, time-outs, answers that are no JSON, and the statuses of RETRIED are tried
again, with waits that double from FIRST_WAIT to LONGEST_WAIT seconds, or as long as the server asks (Retry-After), twice
LONGEST_WAIT at most. What does not pass raises: InputError where no request can succeed (wrong address, key or model),
Refused where this one cannot, and BadRequest, one kind of that, where the server says that the request is the cause.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
from typing import Any
from urllib.parse import urlsplit

from dflash_train.errors import InputError
from dflash_train.units import format_count

RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
FATAL = (401, 403, 404, 405)
BAD = (400, 413, 422)
ABORTED = (None, "abort", "error", "cancelled")
WHOLE = ("stop", "tool_calls", "eos", "eos_token", "end_turn", "stop_sequence")
"""Values of finish_reason: the first two are OpenAI's, the others say the same in other servers."""
UNFINISHED = ("length", "max_tokens")
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0


class Refused(Exception):
    """The server does not answer this request; the text says why."""


class BadRequest(Refused):
    """What is asked is the cause, as far as the server knows: too long for it, or a setting that it does not take."""


class _Passing(Exception):
    """Something that may be otherwise at the next try."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class ChatServer:
    """One server; safe to call from many threads, with one connection a request."""

    def __init__(
        self, url: str, api_key: str | None, timeout: float, retries: int, stop: threading.Event | None = None
    ) -> None:
        """Raises InputError for a URL that is none. `stop` ends waits for another try."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port, host = parts.port, parts.hostname or ""
            host.encode("idna")
            parts.path.encode("ascii")
        except ValueError:  # of a port, an IPv6 address, a label of a name (UnicodeError)
            host = ""
        if not host or parts.scheme not in ("http", "https"):
            raise InputError(f"--server is {url!r}; write an address such as http://localhost:8000/v1.")
        self.url = url
        self.num_retries = 0
        """Tries that were repeated, for the user to know."""
        self.long_wait: str | None = None
        """The first time that the server asked for a longer wait than any is, for the user to know."""
        self._secure, self._host, self._port = parts.scheme == "https", host, port
        self._base = parts.path.rstrip("/") or "/v1"
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout, self._retries, self._stop = timeout, retries, stop or threading.Event()
        self._counting = threading.Lock()

    def models(self) -> list[str]:
        """Names of the models that it serves. Raises InputError if it cannot be reached."""
        try:
            found = self._once("GET", "/models", None)
            return [str(model["id"]) for model in found["data"]]
        except _Passing as error:
            raise InputError(
                f"The server {self.url} does not answer: {error}. Start it, or give its address as --server."
            ) from error
        except (Refused, LookupError, TypeError) as error:
            reason = error if isinstance(error, Refused) else "its answer is no list of models"
            raise InputError(
                f"The server {self.url} does not list its models ({reason}); name the model with --server-model."
            ) from error

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """The first choice of a chat completion, with `usage` of the response in it."""
        for count in range(self._retries + 1):
            try:
                return _choice(self._once("POST", "/chat/completions", request))
            except _Passing as error:
                if count == self._retries or self._stop.is_set():
                    raise Refused(f"the server failed {format_count(count + 1, 'time')}, at last: {error}") from error
                wait = error.wait
                if wait is None:
                    wait = min(FIRST_WAIT * 2**count, LONGEST_WAIT) * random.uniform(0.5, 1.0)
                elif wait > 2 * LONGEST_WAIT:
                    asked, wait = wait, 2 * LONGEST_WAIT
                    self.long_wait = self.long_wait or (
                        f"the server asks to be left alone for {asked:,.0f} s ({error}): requests are tried again after "
                        f"{wait:g} s, {format_count(self._retries, 'time')} at most"
                    )
            with self._counting:
                self.num_retries += 1
            self._stop.wait(wait)
        raise AssertionError("the last try returns or raises")

    def _once(self, method: str, path: str, request: dict[str, Any] | None) -> Any:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout)
        try:
            body = None if request is None else json.dumps(request).encode()
            connection.request(method, self._base + path, body, self._headers)
            response = connection.getresponse()
            data = response.read()
        except TimeoutError as error:
            raise _Passing(f"no answer within {self._timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise _Passing(_why_dropped(error)) from error
        finally:
            connection.close()
        if response.status == 200:
            try:
                return json.loads(data)
            except ValueError as error:
                raise _Passing("its answer is no JSON") from error
        reason = f"HTTP {response.status}{_words(data)}"
        if response.status in RETRIED:
            raise _Passing(reason, _retry_after(response.headers.get("Retry-After")))
        if response.status in FATAL:
            raise InputError(
                f"The server {self.url} refuses {method} {self._base + path}: {reason.rstrip('.')}. Check --server, "
                f"--server-model and --api-key-file."
            )
        raise (BadRequest if response.status in BAD else Refused)(f"the server refuses the request: {reason}")


def _choice(response: Any) -> dict[str, Any]:
    try:
        choice = response["choices"][0]
        if not isinstance(choice["message"], dict):
            raise TypeError
        if choice.get("finish_reason") in ABORTED:
            raise _Passing(f"it gave up the answer (finish_reason {choice.get('finish_reason')})")
    except (LookupError, TypeError) as error:
        raise _Passing("its answer holds no choice with a message") from error
    return {**choice, "usage": response.get("usage") or {}}


def _why_dropped(error: OSError | http.client.HTTPException) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return "the connection ended within an answer"
    if isinstance(error, OSError):
        return error.strerror or str(error) or "the connection failed"
    return "its answer is no HTTP"


def _retry_after(value: str | None) -> float | None:
    return float(value) if value and value.strip().isdecimal() else None


def _words(data: bytes) -> str:
    """What the body of an error says, shortened."""
    text = data.decode(errors="replace")
    try:
        found = json.loads(text)
        found = found.get("error", found)
        text = found.get("message", text) if isinstance(found, dict) else str(found)
    except (ValueError, AttributeError, RecursionError):
        pass
    text = " ".join(str(text).split())
    return f" ({text[:200]})" if text else ""
