"""Answers of a language model, from any server with OpenAI's interface. Needs no torch.

`huggingface_hub.InferenceClient` does not fit: it follows redirections, reads answers of any size, and sends the user's
Hub token to a server without a key.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from http.client import HTTPException
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

REFINE_URL, REFINE_KEY, _ = SERVER_VARIABLES

_LONGEST_WAIT_S = 30.0
_BUSY = frozenset({408, 425, 429, *range(500, 600)})
"""Statuses after which another try may help."""

T = TypeVar("T")


class ServerProblem(HardwareError):
    """The server gives no usable answer."""


class _NoRedirects(HTTPRedirectHandler):
    """Handler that makes a redirection an error. The key and the prompt go to the named server only."""

    def redirect_request(self, *_: object) -> None:
        """Return None: urllib then raises HTTPError."""


class ChatServer:
    """Server that the environment names, with limits of time and tries.

    Args:
        environment: Has OSORA_REFINE_URL, and maybe OSORA_REFINE_KEY and OSORA_REFINE_MODEL.
        timeout_s: Limit of one try.
        tries: Largest number of tries.
        reporter: Shows failed tries.

    Raises:
        RequestError: The environment names no server.
    """

    def __init__(self, environment: Mapping[str, str], *, timeout_s: float, tries: int, reporter: Reporter) -> None:
        url, key, model = (environment.get(name, "").strip() for name in SERVER_VARIABLES)
        hint = f"export {REFINE_URL}=http://localhost:8000/v1, {REFINE_KEY}=... if it wants a key"
        if not url:
            raise RequestError(f"{REFINE_URL} is not set: it names the server that is asked", hint=hint)
        if not _is_web_address(url):
            raise RequestError(
                f"{REFINE_URL} must be an address of http:// or https://, without user, query or fragment", hint=hint
            )
        if not (key.isascii() and key.isprintable()):
            raise RequestError(f"{REFINE_KEY} must have no characters that a header cannot have")
        self.url = url.rstrip("/")
        """Address without `/chat/completions`."""
        self.reporter = reporter
        self._key, self._model, self._timeout_s, self._tries = key, model, timeout_s, tries

    @cached_property
    def model(self) -> str:
        """Name of the model: the one in the environment, or the first that the server lists.

        Raises ServerProblem if the server lists none.
        """
        return self._model or self._try(lambda: _text(self._send("/models", None)["data"][0]["id"]))

    def ask(self, instructions: str, text: str, *, pictures: Sequence[bytes], read: Callable[[str], T]) -> T:
        """Return the result of `read` for the answer. If `read` raises ValueError, the question is repeated.

        `pictures` are JPEG files. Raises ServerProblem if no try gives a usable answer.
        """
        urls = [f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}" for picture in pictures]
        shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [{"type": "text", "text": text}, *shown] if shown else text
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": content}]
        body = {"model": self.model, "messages": messages}
        return self._try(lambda: read(_text(self._send("/chat/completions", body)["choices"][0]["message"]["content"])))

    def _try(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`, which is repeated after an error that may pass."""
        for number in range(1, self._tries + 1):
            wait_s = min(2.0 ** (number - 1), _LONGEST_WAIT_S)
            try:
                return attempt()
            except HTTPError as error:
                with error:
                    reason = self._reason(error)
                if error.code not in _BUSY:
                    hint = f"check {REFINE_KEY}" if error.code in (401, 403) else None
                    raise ServerProblem(f"{self.url} refuses: {reason}", hint=hint) from None
                asked = error.headers.get("Retry-After", "").strip()[:64]
                wait_s = min(float(asked), _LONGEST_WAIT_S) if asked.isdecimal() else wait_s
            except (LookupError, TypeError):
                reason = "an answer of another form"
            except (HTTPException, OSError, ValueError) as error:
                cause = error.reason if isinstance(error, URLError) else error
                reason = self._without_key(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)
                if isinstance(cause, TimeoutError):
                    reason = f"no answer in {self._timeout_s:g} s"
            if number < self._tries:
                self.reporter.note(f"{self.url}: {reason}; try {number + 1} of {self._tries} in {wait_s:.0f} s")
                sleep(wait_s)
        tried = "1 try" if self._tries == 1 else f"{self._tries} tries"
        raise ServerProblem(f"{self.url} gives no answer after {tried}: {reason}", hint="is the server up?")

    def _send(self, path: str, body: object) -> Any:
        """Return the JSON of an answer, within limits of time and size."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        if self._key:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        deadline, content = monotonic() + self._timeout_s, bytearray()
        with build_opener(_NoRedirects).open(request, timeout=self._timeout_s) as response:
            while piece := response.read1(2**16):
                content += piece
                if len(content) > MAX_JSON_BYTES:
                    raise ValueError(f"an answer of over {MAX_JSON_BYTES:,} bytes")
                # The timeout of a socket counts from one byte to the next.
                if monotonic() > deadline:
                    raise TimeoutError
        return parse_object(bytes(content))

    def _reason(self, error: HTTPError) -> str:
        """Return the reason of an error as text, with the message of the server."""
        if 300 <= error.code < 400:
            target = error.headers.get("Location", "elsewhere")
            return f"it redirects to {plain(target)}, which is not followed: set {REFINE_URL} to where it is"
        reason = f"{error.code} {error.reason}"
        # The body may be anything. The status says enough.
        with suppress(HTTPException, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            reason += f": {json.loads(error.read1(2**12))['error']['message']}"
        return self._without_key(reason)

    def _without_key(self, text: str) -> str:
        return plain(" ".join(text.split()).replace(self._key or "\0", "<hidden>"))


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("an answer without text")
    return value


def _is_web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_plain = url.isascii() and url.isprintable() and not {" ", "@", "?", "#"} & set(url)
        return is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False
