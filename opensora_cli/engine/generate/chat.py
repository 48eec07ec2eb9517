"""Single answers of a language model, on any server with OpenAI's interface. Needs no torch.

The interface: https://platform.openai.com/docs/api-reference/chat. Of it `/models` and `/chat/completions` are used, as
llama.cpp, Ollama, vLLM and the commercial services have them.
"""

import base64
import json
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPResponse
from time import monotonic, sleep
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from opensora_cli.core.exceptions import HardwareError, RequestError
from opensora_cli.core.formatting import plain
from opensora_cli.core.progress import Reporter
from opensora_cli.core.strict_json import MAX_JSON_BYTES, parse_object
from opensora_cli.settings.layers import SERVER_VARIABLES

REFINE_URL, REFINE_KEY, REFINE_MODEL = SERVER_VARIABLES

_MAX_ANSWER_BYTES = MAX_JSON_BYTES
_MAX_REASON_BYTES = 2**12
_READ_BYTES = 2**16
_LONGEST_WAIT_S = 30.0
_BUSY = frozenset({408, 425, 429})
"""Besides the 5xx: what another try may help against."""

T = TypeVar("T")


class ServerProblem(HardwareError):
    """The server gives no answer that can be used."""


class _NoRedirects(HTTPRedirectHandler):
    """Follows none: the key and the prompt are for the server that was named."""

    def redirect_request(self, *_: object) -> None:
        """Return None: the redirection becomes an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatServer:
    """A server, and how patient we are with it."""

    url: str
    """Up to where `/chat/completions` follows."""
    key: str | None = field(repr=False)
    model: str | None
    """None: the first that it lists."""
    timeout_s: float
    tries: int
    reporter: Reporter
    _opener: Any = field(default_factory=lambda: build_opener(_NoRedirects), repr=False)

    @classmethod
    def named_in(
        cls, environment: Mapping[str, str], *, timeout_s: float, tries: int, reporter: Reporter
    ) -> "ChatServer":
        """Return the server that the environment names; a RequestError if it names none."""
        url, key = environment.get(REFINE_URL, "").strip(), environment.get(REFINE_KEY, "").strip()
        hint = f"export {REFINE_URL}=http://localhost:8000/v1, {REFINE_KEY}=... if it wants a key"
        if not url:
            raise RequestError(f"{REFINE_URL} is not set: it names the server that is asked", hint=hint)
        if not _is_web_address(url):
            raise RequestError(
                f"{REFINE_URL} must be an address of http:// or https://, without user, query or fragment", hint=hint
            )
        if not (key.isascii() and key.isprintable()):
            raise RequestError(f"{REFINE_KEY} must have no characters that a header cannot have")
        model = environment.get(REFINE_MODEL, "").strip() or None
        return cls(
            url=url.rstrip("/"), key=key or None, model=model, timeout_s=timeout_s, tries=tries, reporter=reporter
        )

    def first_model(self) -> str:
        """Return the model that is asked; a ServerProblem if the server lists none."""
        if self.model is not None:
            return self.model

        def first() -> str:
            name: object = self._send("/models", None)["data"][0]["id"]
            if not isinstance(name, str) or not name:
                raise ValueError("a model without a name")
            return name

        return self._patiently(first)

    def ask(
        self, instructions: str, text: str, *, model: str, pictures: Sequence[bytes], read: Callable[[str], T]
    ) -> T:
        """Return what `read` makes of the answer, which raises ValueError if that is nonsense; then it is asked again.

        `pictures` are JPEG files. A ServerProblem says why there is no answer after all tries.
        """
        content: object = text
        if pictures:
            urls = [f"data:image/jpeg;base64,{base64.b64encode(each).decode()}" for each in pictures]
            shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            content = [{"type": "text", "text": text}, *shown]
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": content}]
        body = {"model": model, "messages": messages}

        def answer() -> T:
            said: object = self._send("/chat/completions", body)["choices"][0]["message"]["content"]
            if not isinstance(said, str):
                raise ValueError("an answer without text")
            return read(said)

        return self._patiently(answer)

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """Return what `attempt` returns, trying again where that may help."""
        for number in range(1, self.tries + 1):
            wait_s = min(2.0 ** (number - 1), _LONGEST_WAIT_S)
            try:
                return _within(self.timeout_s, attempt)
            except HTTPError as error:
                with error:
                    reason = self._reason(error)
                if error.code not in _BUSY and error.code < 500:
                    hint = f"check {REFINE_KEY}" if error.code in (401, 403) else None
                    raise ServerProblem(f"{self.url} refuses: {reason}", hint=hint) from None
                wait_s = _asked_wait_s(error.headers.get("Retry-After", ""), wait_s)
            except (LookupError, TypeError):
                reason = "an answer of another form"
            except (HTTPException, OSError, ValueError) as error:
                reason = self._without_key(self._in_words(error))
            if number < self.tries:
                self.reporter.note(f"{self.url}: {reason}; try {number + 1} of {self.tries} in {wait_s:.0f} s")
                sleep(wait_s)
        tried = "1 try" if self.tries == 1 else f"{self.tries} tries"
        raise ServerProblem(f"{self.url} gives no answer after {tried}: {reason}", hint="is the server up?")

    def _send(self, path: str, body: object) -> Any:
        """Return the JSON that the server answers with."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        if self.key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        deadline = monotonic() + self.timeout_s
        with self._opener.open(request, timeout=self.timeout_s) as response:
            return parse_object(_read(response, deadline))

    def _reason(self, error: HTTPError) -> str:
        """Return what the server says of an error."""
        if 300 <= error.code < 400:
            target = error.headers.get("Location", "elsewhere")
            return f"it redirects to {plain(target)}, which is not followed: set {REFINE_URL} to where it is"
        said = ""
        try:
            answer = json.loads(_within(self.timeout_s, lambda: error.read(_MAX_REASON_BYTES)))
            said = str(answer["error"]["message"])
        except (HTTPException, OSError, ValueError, LookupError, TypeError, RecursionError):
            pass  # it may have answered anything, and the status says enough
        return self._without_key(": ".join(filter(None, (f"{error.code} {error.reason}", said))))

    def _in_words(self, error: Exception) -> str:
        """Return why there is no answer."""
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, TimeoutError):
            return f"no answer in {self.timeout_s:g} s"
        return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__

    def _without_key(self, text: str) -> str:
        return plain(" ".join(text.split()).replace(self.key or "\0", "<hidden>"))


def _is_web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_plain = url.isascii() and url.isprintable() and not {" ", "@", "?", "#"} & set(url)
        return is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` returns; TimeoutError if it takes longer.

    The time limit of a socket counts from one byte to the next, so a server could keep us for ever.
    """
    results: queue.SimpleQueue[tuple[T, None] | tuple[None, Exception]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except Exception as error:
            results.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # it is None only beside an error


def _read(response: HTTPResponse, deadline: float) -> bytes:
    """Read a whole answer, which must be neither endless nor late."""
    content = bytearray()
    while piece := response.read1(_READ_BYTES):
        content += piece
        if len(content) > _MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of over {_MAX_ANSWER_BYTES:,} bytes")
        if monotonic() > deadline:
            raise TimeoutError
    return bytes(content)


def _asked_wait_s(header: str, otherwise: float) -> float:
    """Return how long the server asks us to wait (RFC 9110, 10.2.3), which is not for ever."""
    asked = header.strip()[:64]
    try:
        seconds = float(asked) if asked.isdecimal() else _seconds_until(asked)
    except (ValueError, TypeError, OverflowError):
        return otherwise
    return min(max(seconds, 0.0), _LONGEST_WAIT_S) if math.isfinite(seconds) else otherwise


def _seconds_until(date: str) -> float:
    return (parsedate_to_datetime(date).astimezone(UTC) - datetime.now(UTC)).total_seconds()
