"""Single answers of a language model, from any server with OpenAI's interface. Needs no torch.

The interface is https://platform.openai.com/docs/api-reference/chat, of which `/models` and `/chat/completions` are
used. `huggingface_hub.InferenceClient` does not fit: it follows redirections, reads answers of any size, and sends the
user's Hub token to a server without a key.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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

REFINE_URL, REFINE_KEY, REFINE_MODEL = SERVER_VARIABLES

_MAX_REASON_BYTES = 2**12
_READ_BYTES = 2**16
_LONGEST_WAIT_S = 30.0
_BUSY = frozenset({408, 425, 429})
"""Statuses that another try may help against, besides the 5xx."""

T = TypeVar("T")


class ServerProblem(HardwareError):
    """The server gives no usable answer."""


class _NoRedirects(HTTPRedirectHandler):
    """Makes a redirection an error: the key and the prompt are for the named server."""

    def redirect_request(self, *_: object) -> None:
        """Return None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatServer:
    """A server, with its limits of time and tries."""

    url: str
    """Address without `/chat/completions`."""
    key: str | None = field(repr=False)
    model: str | None
    """None means the first model that the server lists."""
    timeout_s: float
    tries: int
    reporter: Reporter

    @classmethod
    def named_in(
        cls, environment: Mapping[str, str], *, timeout_s: float, tries: int, reporter: Reporter
    ) -> "ChatServer":
        """Return the server that the environment names. Raises RequestError if it names none."""
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
        """Return the name of the model. Raises ServerProblem if the server lists none."""
        if self.model is not None:
            return self.model
        return self._try(lambda: _text(self._send("/models", None)["data"][0]["id"]))

    def ask(
        self, instructions: str, text: str, *, model: str, pictures: Sequence[bytes], read: Callable[[str], T]
    ) -> T:
        """Return the answer as `read` returns it. The question is repeated if `read` raises ValueError.

        `pictures` are JPEG files. Raises ServerProblem if there is no usable answer after all tries.
        """
        content: object = text
        if pictures:
            urls = [f"data:image/jpeg;base64,{base64.b64encode(each).decode()}" for each in pictures]
            shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            content = [{"type": "text", "text": text}, *shown]
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": content}]
        body = {"model": model, "messages": messages}
        return self._try(lambda: read(_text(self._send("/chat/completions", body)["choices"][0]["message"]["content"])))

    def _try(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`, with more tries where another may help."""
        for number in range(1, self.tries + 1):
            wait_s = min(2.0 ** (number - 1), _LONGEST_WAIT_S)
            try:
                return attempt()
            except HTTPError as error:
                with error:
                    reason = self._reason(error)
                if error.code not in _BUSY and error.code < 500:
                    hint = f"check {REFINE_KEY}" if error.code in (401, 403) else None
                    raise ServerProblem(f"{self.url} refuses: {reason}", hint=hint) from None
                asked = error.headers.get("Retry-After", "").strip()[:64]
                wait_s = min(float(asked), _LONGEST_WAIT_S) if asked.isdecimal() else wait_s
            except (LookupError, TypeError):
                reason = "an answer of another form"
            except (HTTPException, OSError, ValueError) as error:
                cause = error.reason if isinstance(error, URLError) else error
                words = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
                reason = self._without_key(words)
                if isinstance(cause, TimeoutError):
                    reason = f"no answer in {self.timeout_s:g} s"
            if number < self.tries:
                self.reporter.note(f"{self.url}: {reason}; try {number + 1} of {self.tries} in {wait_s:.0f} s")
                sleep(wait_s)
        tried = "1 try" if self.tries == 1 else f"{self.tries} tries"
        raise ServerProblem(f"{self.url} gives no answer after {tried}: {reason}", hint="is the server up?")

    def _send(self, path: str, body: object) -> Any:
        """Return the JSON of an answer, which must be neither endless nor late."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        if self.key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self.key}")
        deadline, content = monotonic() + self.timeout_s, bytearray()
        with build_opener(_NoRedirects).open(request, timeout=self.timeout_s) as response:
            while piece := response.read1(_READ_BYTES):
                content += piece
                if len(content) > MAX_JSON_BYTES:
                    raise ValueError(f"an answer of over {MAX_JSON_BYTES:,} bytes")
                # The timeout of a socket counts from one byte to the next.
                if monotonic() > deadline:
                    raise TimeoutError
        return parse_object(bytes(content))

    def _reason(self, error: HTTPError) -> str:
        """Return the server's own words about an error."""
        if 300 <= error.code < 400:
            target = error.headers.get("Location", "elsewhere")
            return f"it redirects to {plain(target)}, which is not followed: set {REFINE_URL} to where it is"
        said = ""
        # Whatever else the body is, the status says enough.
        with suppress(HTTPException, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            said = str(json.loads(error.read1(_MAX_REASON_BYTES))["error"]["message"])
        return self._without_key(": ".join(filter(None, (f"{error.code} {error.reason}", said))))

    def _without_key(self, text: str) -> str:
        return plain(" ".join(text.split()).replace(self.key or "\0", "<hidden>"))


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
