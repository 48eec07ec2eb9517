"""Prompts rewritten, and motion scores chosen, by a language model before anything is made. Needs no torch.

Answers are kept in the user's cache, so that the same request makes the same video again.
"""

import hashlib
import importlib.resources
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from opensora_cli.core.exceptions import FileProblem, OutputError, RequestError
from opensora_cli.core.files import user_cache, write_json_atomic
from opensora_cli.core.formatting import escaped, is_harmful
from opensora_cli.core.progress import Reporter
from opensora_cli.core.reading import read_json_object, read_text
from opensora_cli.engine.generate.chat import ChatServer, ServerProblem
from opensora_cli.settings.generate import GenerateSettings

KINDS = ("t2v", "t2i", "i2v", "motion_score")
MOTION_SCORE = "motion_score"

_SCHEMA = "osora.refined/1"
_MAX_INSTRUCTION_BYTES = 100_000
_LONGEST_PROMPT = 10_000
_PICTURE_SIDE = 1024
_MOTION_SCORES = range(1, 16)
_THOUGHTS = re.compile(r".*</think>", re.DOTALL)
"""Reasoning before an answer. Some servers drop the first tag."""
_QUOTES = ('""', "''", "“”", "„“", "«»", "``")


def refined(settings: GenerateSettings, *, reporter: Reporter) -> GenerateSettings:
    """Return the settings with the prompt and the motion score that a language model gives.

    A server without an answer changes nothing, with a warning. The result asks for no refinement.
    """
    kinds, wanted, prompt = _kinds(settings), settings.refine, settings.prompt
    server = require_refinement(settings, reporter)
    if server is None:
        return settings
    changes: dict[str, object] = {"refine": {"original": wanted.original}}
    with reporter.stage("refine", total=len(kinds)) as progress:
        for kind in kinds:
            is_score = kind == MOTION_SCORE
            asked = prompt if is_score else wanted.original or prompt
            references, folder = settings.condition.references, wanted.instructions
            try:
                answer = refine(asked, kind, server=server, references=references, instructions=folder)
            except ServerProblem as error:
                score = settings.prompt_suffix.motion_score
                kept = f"the motion score stays {'unset' if score is None else score}"
                reason = f"{error.message} ({error.hint})" if error.hint else error.message
                reporter.warn(f"{kept if is_score else 'the prompt stays unchanged'}: {reason}")
            else:
                reporter.note(f"{'motion score' if is_score else 'refined prompt'}: {escaped(answer)}")
                if is_score:
                    changes["prompt_suffix.motion_score"] = int(answer)
                else:
                    prompt = answer
                    changes["refine"] = {"original": asked}
            progress.advance()
    return settings.replace({**changes, "prompt": prompt})


def require_refinement(settings: GenerateSettings, reporter: Reporter) -> ChatServer | None:
    """Return the server for `refined`, None without refinement. Nothing is asked."""
    kinds, refine = _kinds(settings), settings.refine
    if not kinds:
        return None
    server = ChatServer(os.environ, timeout_s=refine.timeout_s, tries=refine.tries, reporter=reporter)
    for kind in kinds:
        read_instructions(kind, refine.instructions)
    return server


def note_plan(settings: GenerateSettings, reporter: Reporter) -> None:
    """Report the server and the instructions that a run would use."""
    try:
        server = require_refinement(settings, reporter)
    except (RequestError, FileProblem) as error:
        reporter.warn("; ".join(filter(None, (f"a run would be refused: {error.message}", error.hint))))
        return
    if server is not None:
        files = ", ".join(str(_instructions_file(kind, settings.refine.instructions)) for kind in _kinds(settings))
        reporter.note(f"refine: nothing is asked for a plan; a run asks {server.url}, with the instructions in {files}")


def _kinds(settings: GenerateSettings) -> list[str]:
    """Return the kinds of questions that `refined` asks, in order."""
    if settings.from_latents is not None:
        return []
    of_prompt = "i2v" if settings.condition.references else "t2i" if settings.video.num_frames == 1 else "t2v"
    return [of_prompt] * settings.refine.prompt + [MOTION_SCORE] * settings.refine.motion_score


def read_instructions(kind: str, folder: str | None) -> str:
    """Return the instructions for a kind. Raises FileProblem if they are missing, empty, or not text."""
    path = _instructions_file(kind, folder)
    text = read_text(path, max_bytes=_MAX_INSTRUCTION_BYTES, hint=f"refine.instructions needs a {path.name}").strip()
    if not text:
        raise FileProblem(f"{path} is empty", hint="write into it what the language model is to do")
    return text


def _instructions_file(kind: str, folder: str | None) -> Path:
    own = Path(str(importlib.resources.files("opensora_cli") / "assets" / "instructions"))
    return (own if folder is None else Path(folder)) / f"{kind}.txt"


def refine(
    prompt: str,
    kind: str,
    *,
    server: ChatServer,
    references: Sequence[str | Path] = (),
    instructions: str | None = None,
) -> str:
    """Return a prompt that a language model has rewritten; for the kind `motion_score`, a number from 1 to 15.

    Args:
        kind: One of `KINDS`.
        references: Pictures and videos, whose first frames the model sees.
        instructions: Folder of the instructions; None for the instructions of osora.
    """
    if kind not in KINDS:
        raise RequestError(f"type={kind!r} must be one of {', '.join(KINDS)}")
    text = read_instructions(kind, instructions)
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
    """Return the first frame of a picture or video as a small JPEG file."""
    from opensora_cli.media.encode import jpeg_bytes
    from opensora_cli.media.read import is_picture, read_picture, read_video

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
    """Return the number in an answer. Raises ValueError if there is none."""
    text = _THOUGHTS.sub("", answer).strip()
    numbers = re.findall(r"[0-9]{1,9}", text)
    if len(numbers) != 1 or int(numbers[0]) not in _MOTION_SCORES:
        raise ValueError(f"{text[:40]!r} is no number from {_MOTION_SCORES[0]} to {_MOTION_SCORES[-1]}")
    return str(int(numbers[0]))
