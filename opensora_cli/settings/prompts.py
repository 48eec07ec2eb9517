"""Settings of prompts: prompts by time, suffixes, and rewriting by a language model."""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, model_validator

from opensora_cli.core.section import Section, SplitAt, Words, split_list

_AT = re.compile(r"\s*(?P<at_s>\d+(\.\d*)?|\.\d+)\s*s\s*=(?P<prompt>.*\S.*)", re.DOTALL)


class PromptAt(Section):
    """Prompt that holds from a time on."""

    at_s: float = Field(ge=0, le=10**6, description="Seconds from the beginning of the video.")
    prompt: Words = Field(min_length=1, description="Prompt from this time on.")

    @model_validator(mode="before")
    @classmethod
    def _read_typed(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        match = _AT.fullmatch(value)
        if match is None:
            raise ValueError(f"prompts_at={value} must be a time in seconds and a prompt, as in 2s=snow, sea")
        return {"at_s": match["at_s"], "prompt": match["prompt"].strip()}

    @property
    def shown(self) -> str:
        """Prompt in its typed form."""
        return f"{self.at_s:g}s={self.prompt}"


class PromptSuffixSettings(Section):
    """Additions to a prompt, as in the captions of the training data."""

    motion_score: int | None = Field(
        default=4,
        ge=0,
        le=100,
        description="Amount of motion, as in 4. none omits it; auto asks the server of --refine.",
    )
    add_fps: bool = Field(default=True, description="Add the frames per second.")


class RefineSettings(Section):
    """Requests to a language model before a video is made."""

    prompt: bool = Field(default=False, description="Rewrite the prompt with the language model at OSORA_REFINE_URL.")
    motion_score: bool = Field(default=False, description="Choose prompt_suffix.motion_score, from 1 to 15.")
    instructions: str | None = Field(
        default=None,
        min_length=1,
        description="Folder with instructions in t2v.txt, t2i.txt, i2v.txt and motion_score.txt. None means osora's.",
    )
    timeout_s: float = Field(default=60.0, gt=0, le=3600, description="Timeout of a try in seconds.")
    tries: int = Field(default=3, ge=1, le=20, description="Largest number of tries.")
    original: Words | None = Field(default=None, description="Prompt before it was rewritten, set by that run.")

    @property
    def is_on(self) -> bool:
        """Whether the language model is asked."""
        return self.prompt or self.motion_score


PromptsAt = Annotated[tuple[PromptAt, ...], SplitAt(";")]


def expand_short_forms(sections: object) -> object:
    """Return sections with short forms of prompts in full, before validation.

    `prompt_suffix.motion_score=auto` becomes `refine.motion_score=true`. A missing prompt becomes the one at 0 s.
    """
    if not isinstance(sections, Mapping):
        return sections
    suffix, refine = sections.get("prompt_suffix"), sections.get("refine", {})
    if isinstance(suffix, Mapping) and isinstance(refine, Mapping) and suffix.get("motion_score") == "auto":
        others = {name: value for name, value in suffix.items() if name != "motion_score"}
        sections = {**sections, "prompt_suffix": others, "refine": {**refine, "motion_score": True}}
    if str(sections.get("prompt") or "").strip():
        return sections
    typed = sections.get("prompts_at") or ()
    first = next(iter(split_list(typed, separator=";") if isinstance(typed, str) else typed), None)
    try:
        at = PromptAt.model_validate(first)
    except ValueError:
        return sections  # The validation of `prompts_at` reports it.
    return sections if at.at_s else {**sections, "prompt": at.prompt}
