"""Training of the demo, from a recipe to exported weights."""

import json
import os
from functools import partial
from pathlib import Path

import torch

from demo_world.autoencoder import finish_autoencoder
from demo_world.settings import Recipe, TextRecipe
from demo_world.source import SceneSource
from demo_world.text_encoders import VOCABULARY_FILE, TextTask, sample_captions
from demo_world.thing_weights import ThingWeights
from opensora_cli.core.exceptions import OutputError
from opensora_cli.core.limits import pick_threads, threads_used
from opensora_cli.core.progress import Reporter
from opensora_cli.core.ranks import find_context
from opensora_cli.data.batches import SampledBatches
from opensora_cli.engine.components.hardware import pick_hardware
from opensora_cli.engine.train.checkpoints import whole_weights
from opensora_cli.engine.train.distribution import Distribution
from opensora_cli.engine.train.early import LOG_FILE
from opensora_cli.engine.train.parallelize import shard
from opensora_cli.engine.train.run import train
from opensora_cli.engine.train.trainer import Clock, Trainer
from opensora_cli.settings.train import VAE_FILE


def train_on_scenes(
    recipe: Recipe, *, resume: Path | bool = False, overwrite: bool = False, reporter: Reporter
) -> list[Path]:
    """Train the autoencoder or the transformer on scenes; return the exported files. It raises what `train` raises."""
    settings, demo = recipe.settings, recipe.demo
    changes_export = not settings.trains_transformer and (demo.gather_taps or demo.whitening_clips > 0)
    if changes_export:
        # Rounded once, at the end.
        settings = settings.replace({"train_vae.export_half": False})
    validation, held_out = settings.validation, None
    if validation.every is not None:
        held_out = SceneSource(demo.scenes.held_out(validation.batches), validation.seed, held_out=True)
    context = find_context(os.environ)
    result = train(
        settings,
        resume=resume,
        overwrite=overwrite,
        reporter=reporter,
        context=context,
        source=SceneSource(demo.scenes, settings.loop.seed),
        held_out=held_out,
        token_weights=None if demo.thing_weight == 1 else ThingWeights(demo.thing_weight, settings.vae.grid),
    )
    assert result is not None  # None only where it started ranks
    if changes_export and (context is None or context.is_main):
        dtype = torch.float16 if recipe.settings.train_vae.export_half else torch.float32
        finish_autoencoder(result.output / VAE_FILE, settings.vae, demo, dtype=dtype)
    return list(result.exports)


def train_text_encoders(recipe: TextRecipe, *, overwrite: bool = False, reporter: Reporter) -> list[Path]:
    """Train both text encoders on captions; return the exported folders. It takes minutes, so it has no checkpoints.

    Raises OutputError if the folder holds an earlier run, and `overwrite` is not given, or it cannot be written.
    """
    output, sizes, loop = Path(recipe.output), recipe.text_encoders, recipe.loop
    if (output / VOCABULARY_FILE).exists() and not overwrite:
        raise OutputError(f"{output} holds an earlier run", hint="replace it with --overwrite")
    output.mkdir(parents=True, exist_ok=True)
    (output / LOG_FILE).unlink(missing_ok=True)
    distribution = Distribution(pick_hardware(recipe.device, "float32").device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(loop.seed)
        task = TextTask(sizes)
        task.forward = shard(task.module, distribution)
        trainer = Trainer(
            task,
            SampledBatches(partial(sample_captions, batch_size=sizes.batch_size), seed=loop.seed),
            loop=loop,
            optimizer=recipe.optimizer,
            compute=recipe.precision.compute,
            distribution=distribution,
            clock=Clock(),
        )
        threads = pick_threads(asked=None, values=sizes.batch_size * sizes.t5_max_length * sizes.t5_width)
        with threads_used(threads, reporter), reporter.stage("train", total=loop.steps, unit="steps") as progress:
            while trainer.step < loop.steps:
                report = trainer.do_step()
                progress.advance()
                trainer.raise_if_stuck()
                if report.step % loop.log_every == 0:
                    with (output / LOG_FILE).open("a", encoding="utf-8") as log:
                        log.write(json.dumps({"step": report.step, **report.figures}) + "\n")
    task.export(whole_weights(trainer), output)
    return [output / "t5", output / "clip", output / VOCABULARY_FILE]
