"""From what was typed to what the text encoders read: suffixes and warnings."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.progress import Reporter
from opensora_cli.core.reading import read_json_object
from opensora_cli.engine.components.weights import Component
from opensora_cli.engine.generate.execution_plan import ExecutionPlan
from opensora_cli.engine.generate.load import prompt_readers
from opensora_cli.models.text.encoders import PromptReader
from opensora_cli.sampling.text import add_fps_info_to_text, add_motion_score_to_text
from opensora_cli.settings.explain import nearest
from opensora_cli.settings.generate import GenerateSettings

_LISTED_WORDS = 10


def with_prompt(settings: GenerateSettings, prompt: str) -> GenerateSettings:
    """Return the settings of a video all of which has this prompt."""
    return settings.replace({"prompt": prompt, "prompts_at": ()}) if settings.prompts_at else settings


def full_prompt(settings: GenerateSettings) -> str:
    """Return the prompt with the suffixes that the model was trained on. Negative prompts get none."""
    prompts = [settings.prompt]
    suffix = settings.prompt_suffix
    if suffix.add_fps:
        prompts = add_fps_info_to_text(prompts, settings.video.fps)
    if suffix.motion_score is not None:
        prompts = add_motion_score_to_text(prompts, suffix.motion_score)
    return prompts[0]


def texts_of(settings: GenerateSettings) -> tuple[str, str]:
    """Return what is encoded for settings of one prompt: that, with its suffixes, and the negative prompt."""
    return full_prompt(settings), settings.negative_prompt


def warn_about_prompts(
    settings: GenerateSettings,
    t5: PromptReader,
    clip: PromptReader,
    reporter: Reporter,
    *,
    vocabulary: Mapping[str, list[str]],
) -> None:
    """Warn, once each, about what the encoders cut off and which words they do not know.

    `vocabulary` maps kinds to the words that the model knows, where these can be listed.
    """
    prompts = texts_of(settings)
    cutting = [
        f"{name} after {encoder.max_length} tokens"
        for name, encoder in (("T5", t5), ("CLIP", clip))
        if any(encoder.truncated(prompt) for prompt in prompts)
    ]
    if cutting:
        reporter.warn(f"the prompt is too long and is cut: {', '.join(cutting)}")
    if not settings.text.known_words_warning:
        return
    # Without the suffixes: those are ours.
    typed = f"{settings.prompt} {settings.negative_prompt}"
    unknown = t5.unknown_words(typed)
    if not unknown:
        return
    known_words = sorted(t5.tokenizer.words)
    near = {word: nearest(word.lower(), known_words) for word in unknown[:_LISTED_WORDS]}
    words = ", ".join(f'"{word}"' + (f' (nearest: "{known}")' if known else "") for word, known in near.items())
    more = f" and {len(unknown) - _LISTED_WORDS} more words" if len(unknown) > _LISTED_WORDS else ""
    knows = "; ".join(f"{kind}: {', '.join(known)}" for kind, known in vocabulary.items())
    reporter.warn(
        f"the {settings.model.name} model does not know {words}{more}" + (f"; it knows {knows}" if knows else "")
    )


def warn_about_planned_prompts(plan: ExecutionPlan, reporter: Reporter) -> None:
    """Warn as the run will, without the weights of the encoders; not where there are none, or none are needed."""
    if plan.decodes_only or not {Component.T5, Component.CLIP} <= plan.weights.paths.keys():
        return
    readers = prompt_readers(plan)
    for prompt in dict.fromkeys(plan.settings.segment_prompts):
        warn_with(readers, replace(plan, settings=with_prompt(plan.settings, prompt)), reporter)


def warn_with(readers: tuple[PromptReader, PromptReader], plan: ExecutionPlan, reporter: Reporter) -> None:
    """Warn about the prompts of a plan of one prompt, as T5 and CLIP read them."""
    vocabulary = read_vocabulary(plan.weights.path(Component.T5).parent)
    warn_about_prompts(plan.settings, *readers, reporter, vocabulary=vocabulary)


def read_vocabulary(folder: Path) -> dict[str, list[str]]:
    """Return what a small model knows, kind to words, from `vocabulary.json` beside its weights; empty without one.

    Raises CheckpointError if that is something else.
    """
    path = folder / "vocabulary.json"
    if not path.is_file():
        return {}
    vocabulary = read_json_object(path, problem=CheckpointError)
    for kind, words in vocabulary.items():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise CheckpointError(f"{path} is broken: {kind} must be a list of words")
    return vocabulary
