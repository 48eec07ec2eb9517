"""Prompts rewritten, and motion scores chosen, by a language model before anything is made. Needs no torch.

Answers are kept in the user's cache, so that the same request makes the same video again. The server has OpenAI's
interface. `huggingface_hub.InferenceClient` would follow redirections and send the user's Hub token to any server.
"""

import base64
import hashlib
import importlib.resources
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from time import sleep
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from opensora_cli.core.exceptions import FileProblem, HardwareError, OutputError, RequestError
from opensora_cli.core.files import user_cache, write_json_atomic
from opensora_cli.core.formatting import escaped, is_harmful, plain
from opensora_cli.core.progress import Reporter
from opensora_cli.core.ranks import beat
from opensora_cli.core.reading import MAX_TEXT_BYTES, parse_object, read_json_object
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import SERVER_VARIABLES

KINDS = ("t2v", "t2i", "i2v", "motion_score")
MOTION_SCORE = "motion_score"
REFINE_URL, REFINE_KEY, _ = SERVER_VARIABLES

_SCHEMA = "osora.refined/1"
_LONGEST_PROMPT = 10_000
_TRIES, _TIMEOUT_S, _LONGEST_PAUSE_S = 3, 60.0, 30
_PICTURE_SIDE = 1024
_MOTION_SCORES = range(1, 16)
_THOUGHTS = re.compile(r".*</think>", re.DOTALL)
"""Reasoning before an answer. Some servers drop the first tag."""
_QUOTES = ('""', "''", "“”", "„“", "«»", "``")
_ADDRESS = re.compile(r"https?://([\w.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?(/[\w.~%/-]*)?", re.ASCII | re.IGNORECASE)
"""Address without user, query and fragment, which may hold secrets."""
_BUSY = frozenset({408, 425, 429, *range(500, 600)})
"""Statuses after which another try may help."""


class _NoRedirects(HTTPRedirectHandler):
    """Handler that makes a redirection an error. The key and the prompt go to the named server only."""

    def redirect_request(self, *_: object) -> None:
        """Return None: urllib then raises HTTPError."""


class ChatServer:
    """Server that the environment names: OSORA_REFINE_URL, and maybe OSORA_REFINE_KEY and OSORA_REFINE_MODEL.

    Args:
        reporter: shows failed tries.
        tries: largest number of tries.

    Raises:
        RequestError: the environment names no server.
    """

    def __init__(self, reporter: Reporter, *, tries: int = _TRIES) -> None:
        url, self._key, self._model = (os.environ.get(name, "").strip() for name in SERVER_VARIABLES)
        hint = f"export {REFINE_URL}=http://localhost:8000/v1, {REFINE_KEY}=... if it wants a key"
        if not url:
            raise RequestError(f"{REFINE_URL} is not set: it names the server that is asked", hint=hint)
        if not _ADDRESS.fullmatch(url):
            rule = "must be an address of http:// or https://, without user, query or fragment"
            raise RequestError(f"{REFINE_URL} {rule}", hint=hint)
        if not (self._key.isascii() and self._key.isprintable()):
            raise RequestError(f"{REFINE_KEY} must have no characters that a header cannot have")
        self.url = url.rstrip("/")
        """Address without `/chat/completions`."""
        self.reporter = reporter
        self._tries = tries

    @property
    def model(self) -> str:
        """Name of the model in the environment, else the first that the server lists; may raise HardwareError."""
        self._model = self._model or self._try(lambda: _text(self._send("/models", None)["data"][0]["id"]))
        return self._model

    def ask(self, instructions: str, text: str, *, pictures: Sequence[bytes], read: Callable[[str], str]) -> str:
        """Return the result of `read` for the answer. If `read` raises ValueError, the question is repeated.

        `pictures` are JPEG files. Raises HardwareError if no try gives a usable answer.
        """
        urls = [f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}" for picture in pictures]
        shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [{"type": "text", "text": text}, *shown] if shown else text
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": content}]
        body = {"model": self.model, "messages": messages}
        return self._try(lambda: read(_text(self._send("/chat/completions", body)["choices"][0]["message"]["content"])))

    def _try(self, attempt: Callable[[], str]) -> str:
        """Return the result of `attempt`, which is repeated after an error that may pass."""
        for number in range(1, self._tries + 1):
            beat("refine", _TIMEOUT_S + _LONGEST_PAUSE_S)  # A rank that waits for the server does not hang.
            try:
                return attempt()
            except HTTPError as error:
                text = b""
                with error, suppress(HTTPException, OSError):  # The body may break off or come too slowly.
                    text = error.read(300)
                reason = self._shown(f"{error.code} {error.reason} {text.decode(errors='replace')}")
                if error.code not in _BUSY:
                    hint = f"check {REFINE_KEY}" if error.code in (401, 403) else None
                    raise HardwareError(f"{self.url} refuses: {reason}", hint=hint) from None
            except (LookupError, TypeError):
                reason = "an answer of another form"
            except (HTTPException, OSError, ValueError) as error:
                cause = getattr(error, "reason", error)
                reason = self._shown(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__)
            if number < self._tries:
                wait_s = min(2 ** (number - 1), _LONGEST_PAUSE_S)
                self.reporter.note(f"{self.url}: {reason}; try {number + 1} of {self._tries} in {wait_s} s")
                sleep(wait_s)
        tried = "1 try" if self._tries == 1 else f"{self._tries} tries"
        hint = "is the server up? Without --refine and --motion-score auto nothing is asked"
        raise HardwareError(f"{self.url} gives no answer after {tried}: {reason}", hint=hint)

    def _send(self, path: str, body: object) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        if self._key:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        with build_opener(_NoRedirects).open(request, timeout=_TIMEOUT_S) as response:
            return parse_object(response.read(MAX_TEXT_BYTES + 1))

    def _shown(self, text: str) -> str:
        return plain(" ".join(text.split()).replace(self._key or "\0", "<hidden>"))


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("an answer without text")
    return value


def refined(settings: GenerateSettings, *, reporter: Reporter) -> GenerateSettings:
    """Return the settings with a refined prompt and motion score. Raises HardwareError without an answer."""
    server = require_refinement(settings, reporter)
    if server is None:
        return settings
    kinds, prompt, original = _kinds(settings), settings.prompt, settings.refine.original
    score = settings.prompt_suffix.motion_score
    with reporter.stage("refine", total=len(kinds)) as progress:
        for kind in kinds:
            is_score = kind == MOTION_SCORE
            asked = prompt if is_score else original or prompt
            answer = refine(asked, kind, server=server, references=settings.condition.references)
            reporter.note(f"{'motion score' if is_score else 'refined prompt'}: {escaped(answer)}")
            if is_score:
                score = int(answer)
            else:
                prompt, original = answer, asked
            progress.advance()
    changes = {"prompt": prompt, "prompt_suffix.motion_score": score, "refine": {"original": original}}
    return settings.replace(changes)


def require_refinement(settings: GenerateSettings, reporter: Reporter) -> ChatServer | None:
    """Return the server for `refined`, None without refinement. Nothing is asked."""
    return ChatServer(reporter) if _kinds(settings) else None


def _kinds(settings: GenerateSettings) -> list[str]:
    if settings.from_latents is not None:
        return []
    made = "t2i" if settings.video.num_frames == 1 else "t2v"
    kinds = ["i2v" if settings.condition.references else made] if settings.refine.prompt else []
    return [*kinds, MOTION_SCORE] if settings.refine.motion_score else kinds


def refine(prompt: str, kind: str, *, server: ChatServer, references: Sequence[str | Path] = ()) -> str:
    """Return a prompt that a language model has rewritten; for the kind `motion_score`, a number from 1 to 15.

    Args:
        kind: One of `KINDS`.
        references: Pictures and videos, whose first frames the model sees.
    """
    if kind not in KINDS:
        raise RequestError(f"type={kind!r} must be one of {', '.join(KINDS)}")
    text = (importlib.resources.files("opensora_cli") / "assets" / "instructions" / f"{kind}.txt").read_text("utf-8")
    pictures = [_jpeg_of(path) for path in references]
    read = _read_score if kind == MOTION_SCORE else _read_prompt
    asked = {
        "prompt": prompt,
        "kind": kind,
        "pictures": [hashlib.sha256(picture).hexdigest() for picture in pictures],
        "instructions": hashlib.sha256(text.encode()).hexdigest(),
        "model": server.model,
    }
    folder = user_cache("refined")
    file = folder and folder / f"{hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()}.json"
    try:
        kept = {} if file is None else read_json_object(file)
        if kept.get("schema") == _SCHEMA:
            return read(kept["answer"])
    except (FileProblem, LookupError, TypeError, ValueError):
        pass  # Ask again.
    answer = server.ask(text, prompt, pictures=pictures, read=read)
    try:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(file, {"schema": _SCHEMA, **asked, "answer": answer})
    except (OutputError, OSError) as error:
        server.reporter.warn(f"the answer is not kept for the next time: {error}")
    return answer


def _jpeg_of(path: str | Path) -> bytes:
    from opensora_cli.media.read import is_picture, read_picture, read_video
    from opensora_cli.media.write import jpeg_bytes

    frame_HWC = read_picture(path) if is_picture(path) else read_video(path, num_frames=1).frames_THWC[0]
    return jpeg_bytes(frame_HWC, longest_side=_PICTURE_SIDE)


def _read_prompt(answer: str) -> str:
    """Return the prompt in an answer. Raises ValueError if there is none."""
    kept = (each for each in _THOUGHTS.sub("", answer) if each.isspace() or not is_harmful(each))
    text = " ".join("".join(kept).split())
    if text.startswith("<think>"):
        raise ValueError("an answer that ends within its thoughts")
    if text[:1] + text[-1:] in _QUOTES and not {text[0], text[-1]} & set(text[1:-1]):
        text = text[1:-1].strip()
    if not text:
        raise ValueError("an empty answer")
    if len(text) > _LONGEST_PROMPT:
        raise ValueError(f"an answer of {len(text):,} characters is no prompt")
    return text


def _read_score(answer: str) -> str:
    text = _THOUGHTS.sub("", answer).strip()
    numbers = re.findall(r"[0-9]{1,9}", text)
    if len(numbers) != 1 or int(numbers[0]) not in _MOTION_SCORES:
        raise ValueError(f"{text[:40]!r} is no number from {_MOTION_SCORES[0]} to {_MOTION_SCORES[-1]}")
    return str(int(numbers[0]))
