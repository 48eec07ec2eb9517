"""Prompts written out by a language model, on any server with OpenAI's interface."""

import base64
import json
import mimetypes
import os
import time
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from opensora_cli.core.exceptions import HardwareError, MediaError, RequestError
from opensora_cli.media.read import is_picture

_TIMEOUT_S = 60.0
_VIDEO = "Rewrite the user's prompt for a text-to-video model: one paragraph in English, at most 120 words, on {}."
_INSTRUCTIONS = {
    "t2v": _VIDEO.format("subject, action, surroundings, light and camera, in the order of time"),
    "t2i": "Rewrite the user's prompt for a text-to-image model: one paragraph in English, at most 80 words, on "
    "subject, surroundings, light and style.",
    "i2v": _VIDEO.format("how what the picture shows moves from now on; add nothing that contradicts the picture"),
    "motion_score": "How much moves in the video that the user describes? Answer with a whole number alone, from 1 "
    "(nothing) to 15 (everything, fast).",
}


def refine(prompt: str, kind: str = "t2v", *, image: str | Path | None = None, tries: int = 3) -> str:
    """Return a prompt as a language model writes it out; for the kind `motion_score`, a number from 1 to 15.

    Any server with OpenAI's interface does: `OPENAI_BASE_URL` is its address, `OPENAI_MODEL` the model's name, and
    `OPENAI_API_KEY` the key, if it wants one. It gets the prompt and the picture, if there is one.

    Raises:
        RequestError: no such kind, no server is named, or it refuses.
        MediaError: the picture cannot be read.
        HardwareError: no answer, or no number, after `tries` tries.
    """
    if kind not in _INSTRUCTIONS:
        raise RequestError(f"type={kind!r} must be one of {', '.join(_INSTRUCTIONS)}")
    content: list[dict[str, object]] = [{"type": "text", "text": prompt}]
    if image is not None:
        content.append({"type": "image_url", "image_url": {"url": _as_address(Path(image))}})
    messages: list[dict[str, object]] = [
        {"role": "system", "content": _INSTRUCTIONS[kind]},
        {"role": "user", "content": content},
    ]
    reason = ""
    for attempt in range(tries):
        if attempt:
            time.sleep(2.0 ** (attempt - 1))
        try:
            answer = _ask(messages)
            if kind != "motion_score" or (answer.isdecimal() and 1 <= int(answer) <= 15):
                return answer
            reason = f"{answer[:40]!r} is no number from 1 to 15"
        except HTTPError as error:
            if error.code not in (408, 429) and error.code < 500:
                raise RequestError(f"OPENAI_BASE_URL: the server refuses: {error.code} {error.reason}") from error
            reason = f"{error.code} {error.reason}"
        except (HTTPException, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"{error.__class__.__name__}: {error}"
    raise HardwareError(f"OPENAI_BASE_URL: no answer after {tries} tries: {reason}", hint="is the server up?")


def _ask(messages: list[dict[str, object]]) -> str:
    address, model = os.environ.get("OPENAI_BASE_URL", ""), os.environ.get("OPENAI_MODEL", "")
    if not address.startswith(("http://", "https://")) or not model:
        raise RequestError(
            "prompts are refined by a server, and OPENAI_BASE_URL and OPENAI_MODEL do not name one",
            hint="export OPENAI_BASE_URL=http://localhost:8000/v1 OPENAI_MODEL=NAME; OPENAI_API_KEY if it wants a key",
        )
    body = json.dumps({"model": model, "messages": messages}).encode()
    request = Request(f"{address.rstrip('/')}/chat/completions", body, {"Content-Type": "application/json"})
    if key := os.environ.get("OPENAI_API_KEY"):
        # Not sent on to where the server may redirect.
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    with urlopen(request, timeout=_TIMEOUT_S) as response:
        answer = json.load(response)["choices"][0]["message"]["content"].strip()
    if not answer:
        raise ValueError("an empty answer")
    return str(answer)


def _as_address(path: Path) -> str:
    if not is_picture(path):
        raise MediaError(f"{path} is not a picture")
    kind = mimetypes.guess_type(path)[0] or "image/png"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
