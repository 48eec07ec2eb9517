"""The part of `speed.py` about compiled blocks: the demo's denoising with `compile=true`, against the same without."""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from speed_pairs import Row, compared
from torch import Tensor

from opensora_cli.engine.components.compiled import compile_blocks
from opensora_cli.engine.components.velocity import PromptEmbeds
from opensora_cli.engine.generate.denoise import sample_latents
from opensora_cli.engine.generate.loading import load_transformer
from opensora_cli.engine.generate.planning import make_plan
from opensora_cli.settings.load import load_preset


def measure_compile(options: argparse.Namespace) -> Iterator[Row]:
    """Yield the demo's denoising from text; the note has the time of the first evaluations, which compile."""
    plan = make_plan(
        load_preset("demo", prompt="a red ball").replace(
            {
                "runtime.device": "cpu",
                "condition.mode": "t2v",
                "sampling.num_inference_steps": options.steps,
                "compile": True,
            }
        )
    )
    generator, length = torch.Generator().manual_seed(0), plan.settings.text.t5_max_length

    def loop(*, compiled: bool) -> Callable[[], Tensor]:
        transformer = load_transformer(plan)
        if compiled:
            compile_blocks(transformer, warn=_fail)
        return partial(sample_latents, plan, transformer, embeds, None, seed=0)

    config = load_transformer(plan).config
    embeds = PromptEmbeds(
        torch.randn(2, length, config.context_in_dim, generator=generator),
        torch.randn(2, config.vec_in_dim, generator=generator),
    )
    plain, ours = loop(compiled=False), loop(compiled=True)
    with torch.inference_mode():
        expected, start = plain(), time.perf_counter()
        found = ours()
        first_s = time.perf_counter() - start
        error = float((found - expected).norm() / expected.norm())
        yield compared(
            f"demo t2v, {plan.model_evaluations} evaluations",
            plain,
            ours,
            pairs=options.pairs,
            note=f"relative error {error:.1e}, first run {first_s:.0f} s",
            figures={"error": error, "first_s": first_s},
        )


def _fail(problem: str) -> None:
    raise RuntimeError(problem)
