"""Prompts rewritten by a language model, and motion scores chosen by it, before anything is made. Needs no torch.

What was answered is kept in the user's cache, so that the same request makes the same video again.
"""

import hashlib
import importlib.resources
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from opensora_cli.core.exceptions import FileProblem, OutputError, RequestError
from opensora_cli.core.files import user_cache, write_json_atomic
from opensora_cli.core.formatting import escaped, is_harmful
from opensora_cli.core.progress import Reporter, SilentReporter
from opensora_cli.core.reading import read_json_object, read_text
from opensora_cli.engine.generate.chat import ChatServer, ServerProblem
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.prompts import RefineSettings

KINDS = ("t2v", "t2i", "i2v", "motion_score")
MOTION_SCORE = "motion_score"

_SCHEMA = "osora.refined/1"
_MAX_INSTRUCTION_BYTES = 100_000
_LONGEST_PROMPT = 10_000
_PICTURE_SIDE = 1024
_MOTION_SCORES = range(1, 16)
_THOUGHTS = re.compile(r".*</think>", re.DOTALL)
"""Reasoning that some models write before their answer; some servers drop the first tag."""
_QUOTES = ('""', "''", "“”", "„“", "«»", "``")


def refine(
    prompt: str,
    kind: str,
    *,
    server: ChatServer,
    references: Sequence[str | Path] = (),
    instructions: str | None = None,
) -> str:
    """Return a prompt as a language model rewrites it; for the kind `motion_score`, a number from 1 to 15.

    Args:
        kind: one of `KINDS`.
        references: pictures and videos whose first frames the model sees.
        instructions: folder of the instructions; None: osora's own.

    Raises:
        RequestError: there is no such kind.
        FileProblem: the instructions are missing or empty, or a reference is missing or broken.
        ServerProblem: the server gives no answer that can be used.
    """
    if kind not in KINDS:
        raise RequestError(f"type={kind!r} must be one of {', '.join(KINDS)}")
    text = read_instructions(kind, instructions)
    pictures = [_jpeg_of(path) for path in references]
    read = _read_score if kind == MOTION_SCORE else _read_prompt
    model = server.first_model()
    asked = {
        "prompt": prompt,
        "kind": kind,
        "pictures": [hashlib.sha256(picture).hexdigest() for picture in pictures],
        "instructions": hashlib.sha256(text.encode()).hexdigest(),
        "model": model,
    }
    file = _cache_file(asked)
    if (known := _cached(file, read)) is not None:
        return known
    answer = server.ask(text, prompt, model=model, pictures=pictures, read=read)
    if file is not None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(file, {"schema": _SCHEMA, **asked, "answer": answer})
        except (OutputError, OSError) as error:
            server.reporter.warn(f"the answer is not kept for the next time: {error}")
    return answer


def refined(settings: GenerateSettings, *, reporter: Reporter) -> GenerateSettings:
    """Return the settings with what they ask a language model for, which then is not asked for again.

    Whatever the server does, there is a result: without an answer the prompt stays as it is, with a warning.

    Raises:
        RequestError: no server is named.
        FileProblem: the instructions are missing or empty, or a reference is missing or broken.
    """
    wanted = settings.refine
    if not wanted.is_on or settings.from_latents is not None:
        return settings
    require_refinement(settings)
    server = _server(wanted, reporter)
    changes: dict[str, object] = {"prompt": settings.prompt, "refine": {"original": wanted.original}}

    def ask(prompt: object, kind: str) -> str:
        references, folder = settings.condition.references, wanted.instructions
        return refine(str(prompt), kind, server=server, references=references, instructions=folder)

    with reporter.stage("refine", total=wanted.prompt + wanted.motion_score) as progress:
        if wanted.prompt:
            try:
                original = wanted.original or settings.prompt
                answer = ask(original, kind_of(settings))
                reporter.note(f"refined prompt: {escaped(answer)}")
                changes |= {"prompt": answer, "refine": {"original": original}}
            except ServerProblem as error:
                reporter.warn(_kept("the prompt stays as it is", error))
            progress.advance()
        if wanted.motion_score:
            try:
                score = int(ask(changes["prompt"], MOTION_SCORE))
                reporter.note(f"motion score: {score}")
                changes["prompt_suffix.motion_score"] = score
            except ServerProblem as error:
                stays = settings.prompt_suffix.motion_score
                reporter.warn(_kept(f"the motion score stays {'unset' if stays is None else stays}", error))
            progress.advance()
    return settings.replace(changes)


def require_refinement(settings: GenerateSettings) -> None:
    """Check what must be there for `refined`, whose errors these are; nothing is asked."""
    if settings.refine.is_on and settings.from_latents is None:
        _server(settings.refine, SilentReporter())
        for kind in _kinds(settings):
            read_instructions(kind, settings.refine.instructions)


def note_plan(settings: GenerateSettings, reporter: Reporter) -> None:
    """Report what a run would ask for, since a plan does not ask."""
    if not settings.refine.is_on or settings.from_latents is not None:
        return
    try:
        require_refinement(settings)
    except (RequestError, FileProblem) as error:
        reporter.warn("; ".join(filter(None, (f"a run would be refused: {error.message}", error.hint))))
        return
    files = ", ".join(str(_instructions_file(kind, settings.refine.instructions)) for kind in _kinds(settings))
    url = _server(settings.refine, reporter).url
    reporter.note(f"refine: nothing is asked for a plan; a run asks {url}, with the instructions in {files}")


def kind_of(settings: GenerateSettings) -> str:
    """Return by which instructions a prompt is rewritten."""
    if settings.condition.references:
        return "i2v"
    return "t2i" if settings.video.num_frames == 1 else "t2v"


def read_instructions(kind: str, folder: str | None) -> str:
    """Return the instructions for a kind. Raises FileProblem if they are missing, empty, or no text."""
    path = _instructions_file(kind, folder)
    text = read_text(path, max_bytes=_MAX_INSTRUCTION_BYTES, hint=f"refine.instructions needs a {path.name}").strip()
    if not text:
        raise FileProblem(f"{path} is empty", hint="write into it what the language model is to do")
    return text


def _kinds(settings: GenerateSettings) -> list[str]:
    return [kind_of(settings)] * settings.refine.prompt + [MOTION_SCORE] * settings.refine.motion_score


def _instructions_file(kind: str, folder: str | None) -> Path:
    own = Path(str(importlib.resources.files("opensora_cli") / "assets" / "instructions"))
    return (own if folder is None else Path(folder)) / f"{kind}.txt"


def _server(wanted: RefineSettings, reporter: Reporter) -> ChatServer:
    return ChatServer.named_in(os.environ, timeout_s=wanted.timeout_s, tries=wanted.tries, reporter=reporter)


def _kept(what: str, error: ServerProblem) -> str:
    return f"{what}: {error.message}" + (f" ({error.hint})" if error.hint else "")


def _jpeg_of(path: str | Path) -> bytes:
    """Return the first frame of a picture or video as a small JPEG file."""
    from opensora_cli.media.pictures import jpeg_bytes
    from opensora_cli.media.read import is_picture, read_picture, read_video

    frame_HWC = read_picture(path) if is_picture(path) else read_video(path, num_frames=1).frames_THWC[0]
    return jpeg_bytes(frame_HWC, longest_side=_PICTURE_SIDE)


def _read_prompt(answer: str) -> str:
    """Return the prompt in an answer; ValueError if there is none."""
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
    """Return the number in an answer; ValueError if there is none."""
    text = _THOUGHTS.sub("", answer).strip()
    numbers = re.findall(r"[0-9]{1,9}", text)
    if len(numbers) != 1 or int(numbers[0]) not in _MOTION_SCORES:
        raise ValueError(f"{text[:40]!r} is no number from {_MOTION_SCORES[0]} to {_MOTION_SCORES[-1]}")
    return str(int(numbers[0]))


def _cache_file(asked: Mapping[str, object]) -> Path | None:
    """Return where the answer to a question is kept; None where the user has no folder for that."""
    folder = user_cache("refined")
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
    return folder and folder / f"{digest}.json"


def _cached(file: Path | None, read: Callable[[str], str]) -> str | None:
    """Return what was answered before; None where nothing is kept, or what is kept is no answer."""
    try:
        document = {} if file is None else read_json_object(file)
        answer = document.get("answer")
        return read(answer) if document.get("schema") == _SCHEMA and isinstance(answer, str) else None
    except (FileProblem, ValueError):
        return None
