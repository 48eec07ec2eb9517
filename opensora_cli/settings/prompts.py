"""Settings of what becomes of a prompt before the model reads it: rewriting, and suffixes."""

from collections.abc import Mapping

from pydantic import Field

from opensora_cli.settings.base import Section, Words

_ASKED = "auto"


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
