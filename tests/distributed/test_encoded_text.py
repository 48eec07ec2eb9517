"""Ranks that share a text encoder: whatever their caches have, rank 0's decides, and all get the same bits."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tiny_world import RecordingReporter, demo_settings, make_world

from opensora_cli.core.files import user_cache
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate import models as generate_models
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.ranks import Ranks
from opensora_cli.engine.generate.text import text_embeds
from opensora_cli.parallel.shares import MeshShape
from opensora_cli.settings.generate import GenerateSettings

Pool = Callable[[int], Any]


def _encode(settings: GenerateSettings) -> tuple[PromptEmbeds, int]:
    """Return the embeddings, and how often T5 was loaded."""
    load_t5, loads = generate_models.load_t5, []
    with patch.object(
        generate_models, "load_t5", lambda plan, **options: loads.append(plan) or load_t5(plan, **options)
    ):
        models = LoadedModels(ranks=Ranks(torch.device("cpu"), MeshShape(ulysses=dist.get_world_size())))
        with models, torch.inference_mode():
            [embeds] = text_embeds(make_plan(settings), models, Events(RecordingReporter()))
    return embeds, len(loads)


def _in_every_state(settings: GenerateSettings, folder: Path) -> list[tuple[bool, int, int]]:
    """Return, for each state of the caches, whether the embeddings are the first ones, T5's loads, and the entries."""
    own = folder / f"rank {dist.get_rank()}"
    is_main, first, found = dist.get_rank() == 0, None, []
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(own)}):
        # What rank 0 has before; rank 1 has the contrary.
        for keeps in (0, 2, 0):
            there = sorted(user_cache("prompts").glob("*")) if is_main else []
            for entry in there[keeps:]:
                entry.unlink()
            if not is_main:
                shutil.rmtree(own, ignore_errors=True)
                if keeps == 0 and first is not None:
                    shutil.copytree(folder / "kept", own)
            dist.barrier()
            embeds, loads = _encode(settings)
            first = first or embeds
            same = torch.equal(embeds.prompt_embeds_2LC, first.prompt_embeds_2LC) and torch.equal(
                embeds.pooled_prompt_embeds_2V, first.pooled_prompt_embeds_2V
            )
            found.append((same, loads, len([*user_cache("prompts").glob("*")])))
            if is_main and not (folder / "kept").exists():
                shutil.copytree(own, folder / "kept")
            dist.barrier()
    return found


def test_rank_0_decides(pool: Pool, tmp_path: Path) -> None:
    settings = demo_settings(make_world(tmp_path), tmp_path)
    first, second = pool(2).run(_in_every_state, settings, tmp_path)
    # Nothing, both prompts, and nothing where rank 1 has both.
    assert first == [(True, 1, 2), (True, 0, 2), (True, 1, 2)]
    assert second == [(True, 1, 0), (True, 0, 0), (True, 1, 2)]
