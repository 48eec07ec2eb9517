"""Encode prompts: suffixes, warnings, the prompt cache, and the text encoders.

Each text is encoded alone, so that its embeddings are bitwise identical whatever else is encoded.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.formatting import nearest
from opensora_cli.core.progress import Reporter
from opensora_cli.core.reading import read_json_object
from opensora_cli.engine.components.hardware import versions
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.components.weights import Component, stamp_of
from opensora_cli.engine.encode.prompt_cache import TextEmbeds
from opensora_cli.engine.estimate.offload import TEXT
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels, retried
from opensora_cli.engine.generate.plan import Plan
from opensora_cli.models.text.encoders import ClipEncoder, T5Encoder
from opensora_cli.sampling.text import add_fps_info_to_text, add_motion_score_to_text
from opensora_cli.settings.generate import GenerateSettings

_LISTED_WORDS = 10


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
    """Return the embeddings of the prompt of each segment, inside `computing`, from the cache or from the encoders."""
    known = _cached_embeds(plan, models, events.reporter)
    if known.keys() >= {*_texts_of(plan.settings)}:
        with events.stage(TEXT):
            events.reporter.note("prompts: read from the cache (--no-cache encodes them again)")
            return _of_segments(plan, known)
    return retried(lambda plan: encode_prompts(plan, models, events, known), plan, TEXT, models, events)[0]


def encode_prompts(
    plan: Plan, models: LoadedModels, events: Events, known: Mapping[str, TextEmbeds] | None = None
) -> tuple[PromptEmbeds, ...]:
    """Return the embeddings of the prompt of each segment; encode and cache the texts that are not `known`."""
    runtime, ranks, found = plan.settings.runtime, models.ranks, dict(known or {})
    missing = [text for text in _texts_of(plan.settings) if text not in found]
    with models.text_encoders(plan, events) as (t5, clip), events.stage(TEXT):
        for text, embeds in encode_texts(missing, t5, clip):
            found[text] = embeds
            if runtime.prompt_cache and ranks.is_main:
                key, limit = name_in_cache(plan, text, ranks=ranks.count), runtime.prompt_cache_limit
                models.prompts.keep(key, embeds, limit=limit, reporter=events.reporter)
        return _of_segments(plan, found)


def encode_texts(texts: Iterable[str], t5: T5Encoder, clip: ClipEncoder) -> Iterator[tuple[str, TextEmbeds]]:
    for text in texts:
        yield text, TextEmbeds(t5.encode([text]), clip.encode([text]))


def _of_segments(plan: Plan, known: Mapping[str, TextEmbeds]) -> tuple[PromptEmbeds, ...]:
    """Return the embeddings of each segment's prompt and of the negative prompt; refuse encoders of other widths."""
    settings, negative = plan.settings, known[plan.settings.negative_prompt]
    for component, key, embeds in (
        (Component.T5, "context_in_dim", negative.prompt_embeds_1LC),
        (Component.CLIP, "vec_in_dim", negative.pooled_prompt_embeds_1V),
    ):
        given, needed = embeds.shape[-1], getattr(settings.model, key)
        if needed != given:
            encodes = f"{plan.weights.path(component)} encodes to {given} numbers"
            raise CheckpointError(f"{encodes}, and the transformer reads model.{key}={needed}")
    prompts = [known[full_prompt(settings, prompt)] for prompt in settings.segment_prompts]
    return tuple(
        PromptEmbeds(
            torch.cat([prompt.prompt_embeds_1LC, negative.prompt_embeds_1LC]),
            torch.cat([prompt.pooled_prompt_embeds_1V, negative.pooled_prompt_embeds_1V]),
        )
        for prompt in prompts
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
    if not unknown:
        return
    listed = []
    for word in unknown[:_LISTED_WORDS]:
        # Words of other languages are rarely meant.
        alike = [known for known in sorted(t5.tokenizer.words) if known[:1] == word[:1].lower()]
        near = nearest(word.lower(), alike, cutoff=0.75)
        listed.append(f'"{word}"' if near is None else f'"{word}" (nearest: "{near}")')
    more = f" and {len(unknown) - _LISTED_WORDS} more words" if len(unknown) > _LISTED_WORDS else ""
    knows = "; ".join(f"{kind}: {', '.join(known)}" for kind, known in read_vocabulary(t5_folder.parent).items())
    known = f"; it knows {knows}" if knows else ""
    reporter.warn(f"the {settings.model.name} model does not know {', '.join(listed)}{more}{known}")


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


def name_in_cache(plan: Plan, text: str, *, ranks: int = 1) -> str:
    """Return the name of a text in the cache: a hash of everything that decides the bits of its embeddings."""
    hardware, settings = plan.hardware, plan.settings
    on_cpu = hardware.device.type == "cpu"
    folders = [plan.weights.path(part) for part in (Component.T5, Component.CLIP)]
    kernels = torch.backends.cpu.get_cpu_capability() if on_cpu else settings.precision.tf32
    made_of = {
        "text": text,
        "files": [[str(folder.resolve()), stamp_of(folder)] for folder in folders],
        "lengths": [settings.text.t5_max_length, settings.text.clip_max_length],
        "dtype": hardware.dtype_name,
        "device": [hardware.device_name, kernels],
        "threads": torch.get_num_threads() if on_cpu else None,
        "ranks": 1 if plan.offload.stream_text else ranks,
        "versions": {**versions(), "tokenizers": importlib.metadata.version("tokenizers")},
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]


def _cached_embeds(plan: Plan, models: LoadedModels, reporter: Reporter) -> Mapping[str, TextEmbeds]:
    """Return the cached texts of a plan, on its device. With several ranks, the cache of rank 0 counts."""
    if not plan.settings.runtime.prompt_cache:
        return {}
    ranks, found = models.ranks, dict[str, TextEmbeds]()
    for text in _texts_of(plan.settings) if ranks.is_main else ():
        if embeds := models.prompts.read(name_in_cache(plan, text, ranks=ranks.count), reporter):
            found[text] = embeds.to(plan.hardware.device)
    cached = ranks.same([*found])
    prompts = ranks.same_tensors([embeds.prompt_embeds_1LC for embeds in found.values()])
    pooled = ranks.same_tensors([embeds.pooled_prompt_embeds_1V for embeds in found.values()])
    return {text: TextEmbeds(*tensors) for text, *tensors in zip(cached, prompts, pooled, strict=True)}
