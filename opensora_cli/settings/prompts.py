"""Settings of what becomes of a prompt before the model reads it: rewriting, and suffixes."""

import re
from collections.abc import Mapping, Sequence

from pydantic import Field

from opensora_cli.settings.base import Section, Words, split_list

_ASKED = "auto"


_AT = re.compile(r"\s*(?P<at_s>\d+(\.\d*)?|\.\d+)\s*s\s*=(?P<prompt>.*\S.*)", re.DOTALL)


class PromptAt(Section):
    """A prompt that holds from a time on."""

    at_s: float = Field(ge=0, le=10**6, description="seconds from the beginning of the video")
    prompt: Words = Field(min_length=1, description="what the video shows from then on")

    @classmethod
    def of_list(cls, value: object) -> object:
        """Return a list of prompts as it can be validated: as text separated by `;`, and each may be `2s=PROMPT`.
        Raises ValueError for other text.
        """
        items = split_list(value, separator=";") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            return items
        return tuple(cls._of_text(item) if isinstance(item, str) else item for item in items)

    @staticmethod
    def _of_text(text: str) -> dict[str, str]:
        match = _AT.fullmatch(text)
        if match is None:
            raise ValueError(f"prompts_at={text} must be a time in seconds and a prompt, as in 2s=snow, sea")
        return {"at_s": match["at_s"], "prompt": match["prompt"].strip()}

    @property
    def shown(self) -> str:
        """The prompt as it can be typed."""
        return f"{self.at_s:g}s={self.prompt}"


class PromptSuffixSettings(Section):
    """What is added to a prompt, as in the captions that the model was trained on."""

    motion_score: int | None = Field(
        default=4, ge=0, le=100, description="how much should move; none: left out, auto: a language model chooses"
    )
    add_fps: bool = Field(default=True, description="add the frames per second")


class RefineSettings(Section):
    """What a language model is asked for before anything is made, on the server that OSORA_REFINE_URL names."""

    prompt: bool = Field(default=False, description="rewrite the prompt")
    motion_score: bool = Field(default=False, description="choose prompt_suffix.motion_score, from 1 to 15")
    instructions: str | None = Field(
        default=None,
        min_length=1,
        description="folder with instructions in t2v.txt, t2i.txt, i2v.txt and motion_score.txt; none: osora's own",
    )
    timeout_s: float = Field(default=60.0, gt=0, le=3600, description="seconds after which a try is given up")
    tries: int = Field(default=3, ge=1, le=20, description="how often the server is asked for the same")
    original: Words | None = Field(
        default=None, description="the prompt that prompt was rewritten from; set by the run that did it"
    )

    @property
    def is_on(self) -> bool:
        """Whether anything is asked for."""
        return self.prompt or self.motion_score


def with_asked_score(sections: object) -> object:
    """Return settings as they can be validated: `prompt_suffix.motion_score=auto` is `refine.motion_score=true`."""
    if not isinstance(sections, Mapping):
        return sections
    suffix, refine = sections.get("prompt_suffix"), sections.get("refine", {})
    if not isinstance(suffix, Mapping) or not isinstance(refine, Mapping) or suffix.get("motion_score") != _ASKED:
        return sections
    others = {name: value for name, value in suffix.items() if name != "motion_score"}
    return {**sections, "prompt_suffix": others, "refine": {**refine, "motion_score": True}}


def with_first_prompt(sections: object) -> object:
    """Return settings as they can be validated: without a prompt, that of the beginning is the one in `prompts_at`."""
    if not isinstance(sections, Mapping) or str(sections.get("prompt") or "").strip():
        return sections
    try:
        items = PromptAt.of_list(sections.get("prompts_at", ()))
        first = PromptAt.model_validate(items[0]) if isinstance(items, Sequence) and items else None
    except ValueError:
        return sections  # what is wrong with it is reported where it is validated
    return sections if first is None or first.at_s else {**sections, "prompt": first.prompt}
