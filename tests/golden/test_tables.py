"""Sizes, schedules, oscillation, prompt suffixes, frame rates and buckets against the recorded tables."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from opensora_cli.data.buckets import NO_BUCKET, Samples, map_target_fps
from opensora_cli.engine.encode.datasets import make_buckets
from opensora_cli.engine.generate.request import picture_settings
from opensora_cli.media.resize import fit_frames
from opensora_cli.sampling.guidance import oscillating_scale
from opensora_cli.sampling.schedule import flow_timesteps
from opensora_cli.sampling.sizes import image_size, inference_sizes, nearest_training_size, training_sizes
from opensora_cli.sampling.text import add_fps_info_to_text, add_motion_score_to_text
from opensora_cli.settings.load import load_preset
from opensora_cli.settings.train_sections import DataSettings

FITTED = (
    *("picture_height", "picture_width", "height", "width"),
    *("scaled_height", "scaled_width", "top", "left"),
)


@pytest.fixture
def rows(golden_json):
    """`rows("schedules")`: the rows of that table, of which there is at least one."""
    tables = golden_json("tables")

    def read(name):
        if not tables.get(name):
            pytest.skip(f"tables.json has no {name}")
        return tables[name]

    return read


def test_image_sizes(rows):
    tables = defaultdict(dict)
    for row in rows("image_sizes"):
        key = (row["resolution"], row["spatial_multiple"], row["training"])
        tables[key][row["aspect_ratio"]] = (row["height"], row["width"])
    for (resolution, multiple, training), expected in tables.items():
        sizes = training_sizes if training else inference_sizes
        assert sizes(resolution, multiple=multiple) == expected, (resolution, multiple, training)


def test_image_size_is_the_inference_table(rows):
    for row in rows("image_sizes"):
        if not row["training"]:
            size = image_size(row["resolution"], row["aspect_ratio"], multiple=row["spatial_multiple"])
            assert size == (row["height"], row["width"]), row


def test_sizes_of_pictures(golden_json, rows):
    """The reference ends with an error for a ratio that its table lacks; osora takes the nearest size of the table."""
    tables = defaultdict(dict)
    for row in rows("image_sizes"):
        if row["training"]:
            size = row["height"], row["width"]
            tables[row["resolution"], row["spatial_multiple"]][row["aspect_ratio"]] = size
    for row in golden_json("pipeline_tables")["text_to_image"]:
        asked = row["img_resolution"], row["aspect_ratio"], row["spatial_multiple"]
        ratio, *size = nearest_training_size(asked[0], asked[1], multiple=asked[2])
        if row["height"] is None:
            table = tables[asked[0], asked[2]]
            assert asked[1] not in table
            assert table[ratio] == tuple(size)
            width, height = map(float, asked[1].split(":"))
            shapes = {name: abs(math.log(known[1] / known[0] * height / width)) for name, known in table.items()}
            assert shapes[ratio] == min(shapes.values()), row
            continue
        assert (ratio, *size) == (row["aspect_ratio"], row["height"], row["width"]), row
        preset = "t2i2v_256px" if asked[2] == 16 else "high_compression"
        video = {"aspect_ratio": row["aspect_ratio"], "resolution": row["resolution"]}
        changes = {**{f"video.{key}": value for key, value in video.items()}, "picture.resolution": asked[0]}
        picture = picture_settings(load_preset(preset, prompt="any").replace(changes))
        # There, one of high compression is then made of half the size a side, which is a mistake.
        assert [picture.video.height, picture.video.width] == size, row


@pytest.mark.slow
def test_pictures_are_scaled_and_cut(golden_json):
    """Those that are made first, and others, as the first frame of a video."""
    tables = golden_json("pipeline_tables")
    made = [
        {**row, **row["fit"], "height": row["video_height"], "width": row["video_width"]}
        for row in tables["text_to_image"]
        if row.get("fit")
    ]
    kinds = {tuple(row[key] for key in FITTED) for row in [*made, *tables["reference_fit"]]}
    assert len(kinds) > 20
    for picture_height, picture_width, height, width, scaled_height, scaled_width, top, left in kinds:
        rows_and_columns = torch.arange(picture_height)[:, None] * 7 + torch.arange(picture_width)
        picture_1HWC = (rows_and_columns % 256).to(torch.uint8)[None, ..., None].expand(1, -1, -1, 3)
        scaled = fit_frames(picture_1HWC, height=scaled_height, width=scaled_width, fit="stretch")
        expected = scaled[:, :, top : top + height, left : left + width]
        assert torch.equal(fit_frames(picture_1HWC, height=height, width=width), expected)


def test_schedules(rows):
    for row in rows("schedules"):
        # A shift of 1 leaves the times evenly spaced: the recorded runs without a shift.
        timesteps = flow_timesteps(
            row["num_steps"],
            tokens_per_frame=row["image_seq_len"],
            num_latent_frames=row["num_frames"],
            flow_shift=row["shift_alpha"] if row["shift"] else 1.0,
        )
        assert timesteps == pytest.approx(row["timesteps"], rel=0, abs=1e-6), row


def test_oscillation(rows):
    for row in rows("oscillation"):
        assert oscillating_scale(row["scale"], row["step"]) == row["value"], row


def test_prompt_suffixes(rows):
    for row in rows("text"):
        with_fps = add_fps_info_to_text([row["text"]], row["fps"])
        assert with_fps == [row["with_fps"]], row
        assert add_motion_score_to_text(with_fps, row["motion"]) == [row["with_both"]], row


def test_frame_rates(rows):
    for row in rows("map_target_fps"):
        assert [*map_target_fps(row["fps"], row["max_fps"])] == row["result"], row


def test_buckets(rows, golden_json):
    data = DataSettings(buckets=golden_json("tables")["bucket_config"])
    for row in rows("buckets"):
        buckets = make_buckets(data.buckets, fps_max=row["fps_max"], multiple=16)
        sample = Samples(
            num_frames=np.array([row["num_frames"]]),
            height=np.array([row["height"]]),
            width=np.array([row["width"]]),
            fps=np.array([np.nan if row["fps"] is None else row["fps"]]),
        )
        index = int(buckets.assign(sample, np.zeros((1, len(buckets.resolutions))))[0])
        found = None if index == NO_BUCKET else buckets[index]
        assert (found and [found.resolution, found.num_frames, found.aspect_ratio]) == row["bucket"], row


def test_the_default_buckets_are_the_recorded_ones(golden_json):
    assert DataSettings() == DataSettings(buckets=golden_json("tables")["bucket_config"])
