"""Encode prompts: suffixes, warnings, and the text encoders.

Each text is encoded alone, so that its embeddings are bitwise identical whatever else is encoded.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.progress import Reporter
from opensora_cli.core.reading import read_json_object
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.components.weights import Component, stamp_of
from opensora_cli.engine.estimate.offload import TEXT
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels, TextEmbeds, retried
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.models.text.encoders import ClipEncoder, T5Encoder
from opensora_cli.sampling.text import add_fps_info_to_text, add_motion_score_to_text
from opensora_cli.settings.generate import GenerateSettings

_LISTED_WORDS = 10
_KEPT_TEXTS = 128
"""Texts whose embeddings stay in memory, 4 MiB each for the released model."""


def full_prompt(settings: GenerateSettings, prompt: str | None = None) -> str:
    """Return a prompt, by default that of `settings`, with the suffixes that the model was trained on."""
    prompts, suffix = [settings.prompt if prompt is None else prompt], settings.prompt_suffix
    if suffix.add_fps:
        prompts = add_fps_info_to_text(prompts, settings.video.fps)
    if suffix.motion_score is not None:
        prompts = add_motion_score_to_text(prompts, suffix.motion_score)
    return prompts[0]


def _texts_of(settings: GenerateSettings) -> list[str]:
    """Return each text to encode once: the prompts of all segments with their suffixes, and the negative prompt."""
    prompts = (full_prompt(settings, prompt) for prompt in settings.segment_prompts)
    return [*dict.fromkeys((*prompts, settings.negative_prompt))]


def text_embeds(plan: Plan, models: LoadedModels, events: Events) -> tuple[PromptEmbeds, ...]:
    """Return the embeddings of the prompt of each segment, inside `computing`. `models` keep the last texts."""
    files = [(path, stamp_of(path)) for path in map(plan.weights.path, (Component.T5, Component.CLIP))]
    # Everything that decides the bits.
    key = str((files, plan.hardware.device, plan.hardware.dtype, plan.settings.text, torch.get_num_threads()))
    known, texts = models.prompts, _texts_of(plan.settings)
    missing = [text for text in texts if (key, text) not in known]

    def encode(plan: Plan) -> list[TextEmbeds]:
        with models.text_encoders(plan, events) as encoders, events.stage(TEXT):
            return [*encode_texts(missing, *encoders)]

    if missing:
        encoded = retried(encode, plan, TEXT, models, events)[0]
        known |= {(key, text): embeds for text, embeds in zip(missing, encoded, strict=True)}
    events.timings_s.setdefault(TEXT, 0.0)
    used = {text: known.pop((key, text)) for text in texts}
    known |= {(key, text): embeds for text, embeds in used.items()}
    while len(known) > _KEPT_TEXTS:  # The least recently used are first.
        del known[next(iter(known))]
    return _of_segments(plan, used)


def encode_texts(texts: Iterable[str], t5: T5Encoder, clip: ClipEncoder) -> Iterator[TextEmbeds]:
    for text in texts:
        yield t5.encode([text]).cpu(), clip.encode([text]).cpu()


def _of_segments(plan: Plan, known: Mapping[str, TextEmbeds]) -> tuple[PromptEmbeds, ...]:
    """Return the embeddings of each segment's prompt and of the negative prompt; refuse encoders of other widths."""
    settings, negative, device = plan.settings, known[plan.settings.negative_prompt], plan.hardware.device
    parts = (Component.T5, "context_in_dim"), (Component.CLIP, "vec_in_dim")
    for (component, key), embeds in zip(parts, negative, strict=True):
        given, needed = embeds.shape[-1], getattr(settings.model, key)
        if needed != given:
            encodes = f"{plan.weights.path(component)} encodes to {given} numbers"
            raise CheckpointError(f"{encodes}, and the transformer reads model.{key}={needed}")
    prompts = [known[full_prompt(settings, prompt)] for prompt in settings.segment_prompts]
    return tuple(
        PromptEmbeds(*(torch.cat(pair).to(device) for pair in zip(prompt, negative, strict=True))) for prompt in prompts
    )


def warn_about_prompts(plan: Plan, reporter: Reporter) -> None:
    """Warn about text that T5 or CLIP truncates, and about words that a small model does not know."""
    if plan.decodes_only or not {Component.T5, Component.CLIP} <= plan.weights.paths.keys():
        return
    settings, t5_folder = plan.settings, plan.weights.path(Component.T5)
    t5 = T5Encoder.reader(t5_folder, max_length=settings.text.t5_max_length)
    clip = ClipEncoder.reader(plan.weights.path(Component.CLIP), max_length=settings.text.clip_max_length)
    readers, texts = {"T5": t5, "CLIP": clip}.items(), _texts_of(settings)
    cut = [f"{name} after {each.max_length} tokens" for name, each in readers if any(map(each.truncated, texts))]
    if cut:
        reporter.warn(f"the prompt is too long and is cut: {', '.join(cut)}")
    if not settings.text.known_words_warning:
        return
    # Without the suffixes, which the user did not type.
    unknown = t5.unknown_words(" ".join((*dict.fromkeys(settings.segment_prompts), settings.negative_prompt)))
    if unknown:
        listed = ", ".join(f'"{word}"' for word in unknown[:_LISTED_WORDS])
        knows = "; ".join(f"{kind}: {', '.join(known)}" for kind, known in read_vocabulary(t5_folder.parent).items())
        known = f"; it knows {knows}" if knows else ""
        reporter.warn(f"the {settings.model.name} model does not know {listed}{known}")


def read_vocabulary(folder: Path) -> dict[str, list[str]]:
    """Return the words of a small model by kind, from `vocabulary.json` beside its weights; empty without it."""
    path = folder / "vocabulary.json"
    if not path.is_file():
        return {}
    vocabulary = read_json_object(path, problem=CheckpointError)
    for kind, words in vocabulary.items():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise CheckpointError(f"{path} is broken: {kind} must be a list of words")
    return vocabulary
