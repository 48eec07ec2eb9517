"""Decoding and saving as one: every piece is written as soon as it is decoded, and what goes wrong leaves no file."""

import itertools
import json

import pytest
import torch
from tiny_world import names, released_settings

from opensora_cli.engine.generate import decode, events
from opensora_cli.engine.generate.run import generate
from opensora_cli.media import write

pytestmark = pytest.mark.usefixtures("without_estimates")

FRAMES = 53
PIECES = 3
LATENTS = "raining-sea_seed42.latents.safetensors"


def settings_of(world, output, **changes):
    return released_settings(world, output, video__num_frames=str(FRAMES), vae__temporal_tiling="true", **changes)


def watch_pieces(monkeypatch, before_each):
    """Call `before_each` with the number of pieces made so far whenever another is about to be decoded."""
    decode_latents = decode.decode_latents

    def watched(*args, **options):
        pieces = decode_latents(*args, **options)
        for made in itertools.count():
            before_each(made)
            piece = next(pieces, None)
            if piece is None:
                return
            yield piece
            del piece

    monkeypatch.setattr(decode, "decode_latents", watched)


def watch_encoder(monkeypatch, before_each, *, name="_yuv_frame"):
    encode = getattr(write, name)

    def watched(*args):
        before_each()
        return encode(*args)

    monkeypatch.setattr(write, name, watched)


def test_a_piece_is_encoded_before_the_next_is_decoded(world, tmp_path, monkeypatch):
    encoded, at_piece = [], []
    watch_encoder(monkeypatch, lambda: encoded.append(1))
    watch_pieces(monkeypatch, lambda made: at_piece.append(len(encoded)))
    generate(settings_of(world, tmp_path))
    assert len(at_piece) == PIECES + 1
    assert (at_piece[0], at_piece[-1]) == (0, FRAMES)
    assert at_piece == sorted(set(at_piece))


def test_out_of_memory_at_the_second_piece_writes_the_whole_file_again(world, tmp_path, monkeypatch, reporter):
    encoded, failed = [], []

    def fail(made):
        if made == 1 and not failed:
            failed.append(len(encoded))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 3 GiB")

    watch_encoder(monkeypatch, lambda: encoded.append(1), name="png_bytes")
    watch_pieces(monkeypatch, fail)
    result = generate(settings_of(world, tmp_path, output__format="png"), reporter=reporter)
    assert reporter.stages[-4:] == ["decode", "load", "decode", "save"]
    assert failed[0] > 0
    assert len(encoded) == failed[0] + FRAMES
    assert names(tmp_path) == ["raining-sea_seed42", "raining-sea_seed42.json"]
    assert reporter.warnings[0].startswith("out of memory in the stage decode: CUDA out of memory")
    with monkeypatch.context() as patched:
        patched.setattr(
            decode, "retried", lambda save, plan, *_, **__: (save(plan.with_stronger_offload("decode")), plan)
        )
        again = generate(settings_of(world, tmp_path / "again", output__format="png"))
    shown, expected = (each.videos[0].path for each in (result, again))
    assert len(names(shown)) == FRAMES
    assert all((shown / name).read_bytes() == (expected / name).read_bytes() for name in names(expected))


def test_decoding_and_saving_are_timed_apart(world, tmp_path, monkeypatch):
    now = [0.0]

    def pass_by(seconds):
        now[0] += seconds

    monkeypatch.setattr(events.time, "perf_counter", lambda: now[0])
    watch_pieces(monkeypatch, lambda made: pass_by(100 if made < PIECES else 0))
    watch_encoder(monkeypatch, lambda: pass_by(1))
    result = generate(settings_of(world, tmp_path, sampling__num_samples="2"))
    assert (result.timings_s["decode"], result.timings_s["save"]) == (200 * PIECES, 2 * FRAMES)
    for video in result.videos:
        timings = json.loads(video.sidecar.read_text())["timings_s"]
        assert (timings["decode"], timings["save"]) == (100 * PIECES, FRAMES)
