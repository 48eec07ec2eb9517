"""`osora vae stats`: equal to torch's mean and deviation of all latents, on files of every sort."""

from pathlib import Path

import pytest
import torch
from tiny_world import RecordingReporter
from torch import Tensor

from opensora_cli.core.exceptions import BatchError
from opensora_cli.engine.components.architectures import load_autoencoder, new_autoencoder
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.vae.stats import ChannelStatistics, channel_statistics, latent_statistics, scaling_settings
from opensora_cli.media.read import read_picture, read_video
from opensora_cli.media.write import write_media
from opensora_cli.models.vae.autoencoder import Autoencoder
from opensora_cli.settings.components import VAESettings
from opensora_cli.settings.layers import Given
from opensora_cli.settings.tools import EncodeSettings, load_vae_settings

CPU = torch.device("cpu")


def settings_of(files: list[str], **changes: object) -> EncodeSettings:
    overrides = {"files": Given(tuple(files), "FILE")}
    settings = load_vae_settings(EncodeSettings, config=None, overrides=overrides, environment={})
    return settings.replace({"runtime.device": "cpu", **{key.replace("__", "."): at for key, at in changes.items()}})


@pytest.fixture(scope="module")
def autoencoder() -> Autoencoder:
    settings = settings_of(["any.png"])
    return load_autoencoder(settings.vae, packaged_demo() / settings.weights.file, device=CPU, dtype=torch.float32)


def encoded(autoencoder: Autoencoder, frames_THWC: Tensor) -> Tensor:
    """Return latents as (C,N)."""
    pixels = frames_THWC.permute(3, 0, 1, 2)[None].float() / 127.5 - 1.0
    with torch.inference_mode():
        return autoencoder.encode(pixels)[0].flatten(1)


def noise(count: int, height: int, width: int, *, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 256, (count, height // 4, width // 4, 3), generator=generator, dtype=torch.uint8)
    return coarse.repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)


def test_statistics_are_those_of_all_latents_of_pictures_videos_and_folders(
    tmp_path: Path, autoencoder: Autoencoder
) -> None:
    folder = tmp_path / "clips" / "below"
    folder.mkdir(parents=True)
    # 13 frames in clips of 5: 5, 5, and of the last 3 the first one.
    write_media([noise(13, 16, 24, seed=1)], folder / "long.mp4", fps=12, format="mp4")
    write_media([noise(1, 18, 29, seed=2)], folder / "odd.png", fps=1, format="png")
    write_media([noise(1, 16, 16, seed=3)], tmp_path / "alone.png", fps=1, format="png")
    (folder / "notes.txt").write_text("no picture")
    settings, reporter = settings_of([str(tmp_path / "clips"), str(tmp_path / "alone.png")]), RecordingReporter()
    found = latent_statistics(settings.replace({"clip.num_frames": 5}), reporter=reporter)
    assert reporter.warnings == []
    video = read_video(folder / "long.mp4").frames_THWC
    odd, alone = read_picture(folder / "odd.png"), read_picture(tmp_path / "alone.png")
    top, left = (odd.shape[0] - 16) // 2, (odd.shape[1] - 28) // 2
    clips = [video[:5], video[5:10], video[10:11], odd[None, top : top + 16, left : left + 28], alone[None]]
    latents_CN = torch.cat([encoded(autoencoder, clip) for clip in clips], dim=1).double()
    assert (found.files, found.frames, found.values_per_channel) == (3, 13, latents_CN.shape[1])
    means, deviations = zip(*((row.mean, row.deviation) for row in found.channels), strict=True)
    torch.testing.assert_close(torch.tensor(means, dtype=torch.float64), latents_CN.mean(dim=1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.tensor(deviations, dtype=torch.float64), latents_CN.std(dim=1), rtol=1e-5, atol=1e-6
    )
    assert found.mean == pytest.approx(latents_CN.mean().item(), rel=1e-5)
    assert found.deviation == pytest.approx(latents_CN.std().item(), rel=1e-5)
    # The demo's latents are scaled by 1, so that the settings are those of what is encoded.
    assert found.settings["vae.scale_factor"] == pytest.approx(1 / latents_CN.std().item(), rel=1e-5)
    assert found.settings["vae.shift_factor"] == pytest.approx(latents_CN.mean().item(), rel=1e-5)
    lines = found.lines()
    assert len(lines) == 1 + 16 + 1 + 2
    assert lines[-1].startswith("settings   --set vae.scale_factor=")


def test_files_that_cannot_be_read_are_listed_and_do_not_count(tmp_path: Path) -> None:
    write_media([noise(1, 16, 16, seed=3)], tmp_path / "good.png", fps=1, format="png")
    (tmp_path / "bad.mp4").write_text("nothing")
    write_media([noise(1, 16, 16, seed=3)[:, :3, :3]], tmp_path / "small.png", fps=1, format="png")
    alone = RecordingReporter()
    good = latent_statistics(settings_of([str(tmp_path / "good.png")]), reporter=alone)
    assert alone.warnings == [
        "the latents of one file tell little of others: take many clips of the data to scale by them"
    ]
    mixed = latent_statistics(settings_of([str(tmp_path / name) for name in ("bad.mp4", "good.png", "small.png")]))
    assert mixed.channels == good.channels
    assert [Path(failed.file).name for failed in mixed.failed] == ["bad.mp4", "small.png"]
    with pytest.raises(BatchError, match="2 of 3 files could not be encoded") as raised:
        mixed.raise_for_problems()
    assert "3x3 pixels are too few" in raised.value.message
    good.raise_for_problems()
    nothing = latent_statistics(settings_of([str(tmp_path / "bad.mp4")]))
    assert (nothing.channels, nothing.mean, nothing.settings) == ((), None, {})


def test_one_value_has_no_deviation() -> None:
    [one] = channel_statistics(1, torch.tensor([[3.0], [9.0]]))
    assert (one.mean, one.deviation) == (3.0, None)


@pytest.mark.parametrize(
    "settings",
    [
        VAESettings(scale_factor=0.5, shift_factor=0.25),
        VAESettings(kind="dc_ae"),
        VAESettings(kind="dc_ae", dc_ae={"scaling_factor": 0.493}),
        VAESettings(kind="flux_ae"),
    ],
    ids=["hunyuan", "dc_ae", "dc_ae scaled", "flux_ae"],
)
def test_the_settings_scale_what_is_encoded_to_deviation_1(settings: VAESettings) -> None:
    with torch.device("meta"):
        before = new_autoencoder(settings)
        encoded_values = torch.linspace(-3, 5, 1001, dtype=torch.float64, device="cpu")
        latents = before.scale_latents(encoded_values)
        of_latents = ChannelStatistics(mean=latents.mean().item(), deviation=latents.std().item())
        changes = {key.removeprefix("vae."): value for key, value in scaling_settings(settings, of_latents).items()}
        after = new_autoencoder(settings.replace(changes)).scale_latents(encoded_values)
    assert after.std().item() == pytest.approx(1.0)
    if settings.kind != "dc_ae":
        assert after.mean().item() == pytest.approx(0.0, abs=1e-9)
