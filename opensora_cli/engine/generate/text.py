"""From prompts to embeddings: suffixes and warnings, the prompt cache, and the encoders.

Each text is encoded alone, so its embeddings have the same bits whatever else is encoded, now or in an earlier run.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist

from opensora_cli.core.exceptions import CheckpointError
from opensora_cli.core.progress import Reporter
from opensora_cli.core.rank_messages import broadcast_json
from opensora_cli.core.reading import read_json_object
from opensora_cli.engine.components.hardware import versions
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.components.weights import Component, stamp_of
from opensora_cli.engine.encode.prompt_cache import PromptCache, TextEmbeds
from opensora_cli.engine.estimate.offload import TEXT
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.loading import prompt_readers
from opensora_cli.engine.generate.models import LoadedModels, retried
from opensora_cli.engine.generate.plan import Chain, Plan, alone
from opensora_cli.engine.generate.ranks import broadcast_tensors
from opensora_cli.engine.generate.room import require_fit
from opensora_cli.models.text.encoders import ClipEncoder, PromptReader, T5Encoder
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


def warn_about_planned_prompts(plan: Plan, reporter: Reporter) -> None:
    """Warn as the run will, without the weights of the encoders; not where there are none, or none are needed."""
    if plan.decodes_only or not {Component.T5, Component.CLIP} <= plan.weights.paths.keys():
        return
    readers = prompt_readers(plan)
    for prompt in dict.fromkeys(plan.settings.segment_prompts):
        warn_with(readers, replace(plan, settings=with_prompt(plan.settings, prompt)), reporter)


def warn_with(readers: tuple[PromptReader, PromptReader], plan: Plan, reporter: Reporter) -> None:
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


_NOTHING: Mapping[str, TextEmbeds] = MappingProxyType({})


def text_embeds(plan: Plan, models: LoadedModels, record: Events) -> tuple[PromptEmbeds, ...]:
    """Return the embeddings of each segment's prompt, inside `computing`, equal ones once.

    Raises:
        CheckpointError: encoders are broken, or do not fit the transformer.
        HardwareError: out of memory.
    """
    prompts = plan.settings.segment_prompts

    def embeds(prompt: str) -> PromptEmbeds:
        of_prompt = replace(plan, settings=with_prompt(plan.settings, prompt))
        known = _known_texts(of_prompt, models, record.reporter)
        if known.keys() >= {*texts_of(of_prompt.settings)}:
            with record.stage(TEXT):
                warn_with(models.prompt_readers(of_prompt), of_prompt, record.reporter)
                return _both(of_prompt, known)
        if not of_prompt.encodes_text:  # the cache has less than it had
            of_prompt = of_prompt.with_offload(of_prompt.fitting.choose(of_prompt.budget_bytes))
            require_fit(alone(of_prompt))
        return retried(lambda plan: encode_text(plan, models, record, known), of_prompt, TEXT, models, record)[0]

    found = {prompt: embeds(prompt) for prompt in dict.fromkeys(prompts)}
    return tuple(found[prompt] for prompt in prompts)


def encode_text(
    plan: Plan, models: LoadedModels, record: Events, known: Mapping[str, TextEmbeds] = _NOTHING
) -> PromptEmbeds:
    """Return the embeddings of a prompt and the negative prompt, encoded but for those that are `known`."""
    missing = [text for text in texts_of(plan.settings) if text not in known]
    with models.text_encoders(plan, record) as (t5, clip), record.stage(TEXT):
        warn_with((t5, clip), plan, record.reporter)
        found = dict(known)
        for text, embeds in encode_texts(missing, t5, clip):
            found[text] = embeds
            _keep(plan, text, embeds, models, record.reporter)
        return _both(plan, found)


def encode_texts(texts: Iterable[str], t5: T5Encoder, clip: ClipEncoder) -> Iterator[tuple[str, TextEmbeds]]:
    """Yield each text, once, with its embeddings."""
    for text in dict.fromkeys(texts):
        yield text, TextEmbeds(t5.encode([text]), clip.encode([text]))


def _both(plan: Plan, known: Mapping[str, TextEmbeds]) -> PromptEmbeds:
    """Return those of the prompt and the negative prompt together.

    Raises CheckpointError if an encoder is of another width than the transformer reads.
    """
    both = [known[text] for text in texts_of(plan.settings)]
    embeds = PromptEmbeds(
        torch.cat([each.prompt_embeds_1LC for each in both]), torch.cat([each.pooled_prompt_embeds_1V for each in both])
    )
    model = plan.settings.model
    for component, key, needed, given in (
        (Component.T5, "context_in_dim", model.context_in_dim, embeds.prompt_embeds_2LC.shape[-1]),
        (Component.CLIP, "vec_in_dim", model.vec_in_dim, embeds.pooled_prompt_embeds_2V.shape[-1]),
    ):
        if needed != given:
            folder = plan.weights.path(component)
            raise CheckpointError(
                f"{folder} encodes to {given} numbers, and the transformer reads model.{key}={needed}"
            )
    return embeds


def name_in_cache(plan: Plan, text: str, *, threads: int, ranks: int = 1) -> str:
    """Return what a text is called in the cache: a hash of all that decides the bits of its embeddings.

    Of the encoders' files, which are large, size and time of change stand for the content. On a CPU sums depend on its
    `threads`, and everywhere on how many `ranks` share the layers of T5.
    """
    hardware, settings = plan.hardware, plan.settings
    on_cpu = hardware.device.type == "cpu"
    kernels = torch.backends.cpu.get_cpu_capability() if on_cpu else settings.precision.tf32
    made_of = {
        "text": text,
        "files": [
            [str(path.resolve()), stamp_of(path)]
            for path in (plan.weights.path(part) for part in (Component.T5, Component.CLIP))
        ],
        "lengths": [settings.text.t5_max_length, settings.text.clip_max_length],
        "dtype": hardware.dtype_name,
        "device": [hardware.device_name, kernels],
        "threads": threads if on_cpu else None,
        "ranks": 1 if plan.offload.stream_text else ranks,
        "versions": {**versions(), "transformers": importlib.metadata.version("transformers")},
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:32]


def without_cached_text(chain: Chain, cache: PromptCache, *, by: str | None = None) -> Chain:
    """Return the chain of one process without its text stages, if the cache has the embeddings of all their prompts.

    On a CPU it gets threads, since embeddings depend on them; `by` is the source of their number.
    """
    plan = chain.video
    if not plan.settings.runtime.prompt_cache or plan.mesh.size > 1 or plan.decodes_only or cache.folder is None:
        return chain
    if any(part not in plan.weights.paths for part in (Component.T5, Component.CLIP)):
        return chain
    if plan.hardware.device.type == "cpu":
        chain = chain.change(lambda each: replace(each, threads=plan.with_picked_threads(by).threads))

    def change(plan: Plan) -> Plan:
        prompts = (replace(plan, settings=with_prompt(plan.settings, each)) for each in plan.settings.segment_prompts)
        texts = {text for each in prompts for text in texts_of(each.settings)}
        count = plan.threads.count if plan.threads is not None else 0
        if not all(cache.has(name_in_cache(plan, text, threads=count)) for text in texts):
            return plan
        return replace(plan, stages=tuple(stage for stage in plan.stages if stage.name != TEXT))

    return chain.change(change)


def _known_texts(plan: Plan, models: LoadedModels, reporter: Reporter) -> Mapping[str, TextEmbeds]:
    """Return those of a plan's texts that the cache has, on its device; of several ranks, as rank 0 has them."""
    if not plan.settings.runtime.prompt_cache:
        return {}
    device, found, texts = plan.hardware.device, dict[str, TextEmbeds](), [*dict.fromkeys(texts_of(plan.settings))]
    if models.is_main:
        for text in texts:
            embeds = models.prompts.read(_name(plan, text, models), reporter)
            if embeds is not None:
                found[text] = embeds.to(device)
    if models.text_group is None:
        return found
    flags = broadcast_json([text in found for text in texts])
    tensors = [each for embeds in found.values() for each in (embeds.prompt_embeds_1LC, embeds.pooled_prompt_embeds_1V)]
    tensors = broadcast_tensors(tensors, device=device)
    there = [text for text, is_there in zip(texts, flags, strict=True) if is_there]
    return {text: TextEmbeds(*tensors[2 * index : 2 * index + 2]) for index, text in enumerate(there)}


def _keep(plan: Plan, text: str, embeds: TextEmbeds, models: LoadedModels, reporter: Reporter) -> None:
    """Keep what was encoded in the cache; of several ranks rank 0 does."""
    runtime = plan.settings.runtime
    if runtime.prompt_cache and models.is_main:
        name = _name(plan, text, models)
        models.prompts.keep(name, embeds, limit=runtime.prompt_cache_limit, reporter=reporter)


def _name(plan: Plan, text: str, models: LoadedModels) -> str:
    ranks = 1 if models.text_group is None else dist.get_world_size(models.text_group)
    return name_in_cache(plan, text, threads=torch.get_num_threads(), ranks=ranks)
