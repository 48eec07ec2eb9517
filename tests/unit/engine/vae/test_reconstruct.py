"""`osora vae reconstruct`: windows over long videos, every kind of autoencoder, files that fail, what is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_autoencoders import SMALL_DC_AE, SMALL_FLUX_AE, SMALL_HUNYUAN
from torch import Tensor

from opensora_cli.core.exceptions import BatchError, OutputError
from opensora_cli.engine.components.architectures import new_autoencoder
from opensora_cli.engine.vae import reconstruct as vae_reconstruct
from opensora_cli.engine.vae.reconstruct import Failed, Reconstructed, reconstruct, windows
from opensora_cli.media.read import read_picture, read_video
from opensora_cli.media.similarity import psnr_db, ssim
from opensora_cli.media.write import write_media
from opensora_cli.models.vae.hunyuan import HunyuanVAE
from opensora_cli.settings.components import VAESettings
from opensora_cli.settings.layers import Given
from opensora_cli.settings.tools import ReconstructSettings, load_vae_settings

TINY: dict[str, dict[str, Any]] = {
    "hunyuan": SMALL_HUNYUAN.model_dump(),
    "dc_ae": {"dc_ae": SMALL_DC_AE.model_dump()},
    "flux_ae": {"flux_ae": SMALL_FLUX_AE.model_dump()},
}


def frames(count: int, height: int = 24, width: int = 20) -> Tensor:
    """Smooth frames (T,H,W,3) that grow brighter, no two of them alike."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pictures = [
        torch.stack([8 + 6 * index + 0 * rows, 20 + 2 * columns + 3 * index, 20 + 3 * rows + 3 * index], dim=-1)
        for index in range(count)
    ]
    return torch.stack(pictures).to(torch.uint8)


def write_video(path: Path, count: int, **size: int) -> str:
    write_media([frames(count, **size)], path, fps=12, format="mp4")
    return str(path)


def write_picture(path: Path, **size: int) -> str:
    write_media([frames(1, **size)], path, fps=1, format="png")
    return str(path)


def tiny_settings(folder: Path, kind: str, files: list[str], **changes: object) -> ReconstructSettings:
    """Settings of a tiny autoencoder, whose random weights are written."""
    settings = ReconstructSettings(files=tuple(files), vae={"kind": kind, **TINY[kind]})
    torch.manual_seed(0)
    weights = folder / "weights" / "vae.safetensors"
    weights.parent.mkdir(exist_ok=True)
    save_file(new_autoencoder(settings.vae).state_dict(), weights)
    where = {"runtime.weights": str(weights.parent), "output.folder": str(folder / "out"), "runtime.device": "cpu"}
    return settings.replace({**where, **changes})


def demo_settings(folder: Path, files: list[str]) -> ReconstructSettings:
    overrides = {"files": Given(tuple(files), "FILE")}
    settings = load_vae_settings(ReconstructSettings, config=None, overrides=overrides, environment={})
    return settings.replace({"output.folder": str(folder / "out"), "runtime.device": "cpu"})


def reconstruct_one(settings: ReconstructSettings) -> Reconstructed:
    """Reconstruct the one file of `settings`, which succeeds."""
    [row] = reconstruct(settings).files
    assert isinstance(row, Reconstructed)
    return row


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [([0], 1)]),
        (3, [([0, 1, 2], 3)]),
        (4, [([0, 1, 2, 3], 4)]),
        (5, [([0, 1, 2, 3], 4), ([1, 2, 3, 4], 1)]),
        (11, [([0, 1, 2, 3], 4), ([4, 5, 6, 7], 4), ([7, 8, 9, 10], 3)]),
        (0, []),
    ],
)
def test_windows_are_whole_and_bring_every_frame_once(count: int, expected: list[tuple[list[int], int]]) -> None:
    numbered = (torch.full((1, 1, 3), index, dtype=torch.uint8) for index in range(count))
    found = [(frames_THWC[:, 0, 0, 0].tolist(), num_new) for frames_THWC, num_new in windows(numbered, 4)]
    assert found == expected


class Dimmed:
    """Stands in for an autoencoder: gives back what it gets, a tenth darker."""

    grid = new_autoencoder(VAESettings.model_validate(TINY["hunyuan"])).grid
    config = grid

    def encode(self, pixels_BCTHW: Tensor, **_: object) -> Tensor:
        assert pixels_BCTHW.shape[2] % 4 == 1
        return pixels_BCTHW

    def decode(self, latents_BCTHW: Tensor, **_: object) -> Tensor:
        return (latents_BCTHW + 1) * 0.9 - 1


def test_every_frame_of_a_long_video_stands_beside_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vae_reconstruct, "load_autoencoder", lambda *_, **__: Dimmed())
    video = write_video(tmp_path / "long.mp4", 40, height=32, width=48)
    row = reconstruct_one(demo_settings(tmp_path, [video]))
    assert (row.num_frames, row.height, row.width) == (40, 32, 48)
    shown = read_video(row.output)
    assert shown.frames_THWC.shape == (40, 32, 96, 3)
    assert shown.fps == pytest.approx(12)
    given = frames(40, height=32, width=48)
    dimmed = (given.float() * 0.9).round().to(torch.uint8)
    for index in range(40):
        left, right = shown.frames_THWC[index].chunk(2, dim=1)
        assert most_alike(left, given) == most_alike(right, dimmed) == index
        assert row.frame_psnr_db[index] == pytest.approx(psnr_db(given[index], dimmed[index]), abs=0.5)
        assert row.frame_ssim[index] == pytest.approx(ssim(given[index], dimmed[index]), abs=0.02)


def most_alike(picture_HWC: Tensor, clip_THWC: Tensor) -> int:
    return max(range(len(clip_THWC)), key=lambda index: psnr_db(picture_HWC, clip_THWC[index]))


def test_a_picture_comes_back_without_loss_of_the_file(tmp_path: Path) -> None:
    picture = write_picture(tmp_path / "odd.png", height=33, width=30)
    row = reconstruct_one(demo_settings(tmp_path, [picture]))
    assert row.output == tmp_path / "out" / "odd_reconstructed.png"
    shown = read_picture(row.output)
    assert shown.shape == (32, 56, 3)
    left, right = shown.chunk(2, dim=1)
    # Cropped in the middle.
    assert torch.equal(left, frames(1, height=33, width=30)[0, :32, 1:29])
    assert row.frame_psnr_db == (psnr_db(left, right),)
    assert row.frame_ssim == (ssim(left, right),)
    assert row.psnr_db > 20


def test_the_sidecar_says_how_it_was_made(tmp_path: Path) -> None:
    video = write_video(tmp_path / "a.mp4", 5, height=32, width=32)
    settings = demo_settings(tmp_path, [video])
    row = reconstruct_one(settings)
    sidecar = json.loads((tmp_path / "out" / "a_reconstructed.mp4.json").read_text(encoding="utf-8"))
    assert sidecar["schema"] == "osora.vae-reconstruct-file/1"
    assert len(sidecar["frame_psnr_db"]) == len(sidecar["frame_ssim"]) == 5
    assert sidecar["psnr_db"] == row.psnr_db == pytest.approx(sum(row.frame_psnr_db) / 5, abs=1e-3)
    assert ReconstructSettings.model_validate(sidecar["settings"]) == settings
    assert {"versions", "device", "dtype", "weights", "timings_s"} <= sidecar.keys()


@pytest.mark.parametrize(
    ("kind", "count", "expected", "temporal_tiling"),
    [
        ("hunyuan", 7, 5, False),
        pytest.param("hunyuan", 21, 21, True, marks=pytest.mark.slow),
        ("dc_ae", 7, 1, True),  # a clip of one latent frame would come back as a picture
        ("dc_ae", 11, 8, False),
        ("dc_ae", 23, 23, True),
        ("flux_ae", 7, 7, False),
    ],
)
def test_every_kind_gives_back_what_it_can(
    tmp_path: Path, kind: str, count: int, expected: int, temporal_tiling: bool
) -> None:
    video = write_video(tmp_path / "a.mp4", count)
    settings = tiny_settings(tmp_path, kind, [video], **{"clip.num_frames": 20, "vae.temporal_tiling": temporal_tiling})
    row = reconstruct_one(settings)
    assert row.num_frames == len(row.frame_psnr_db) == len(row.frame_ssim) == expected
    assert read_video(row.output).frames_THWC.shape == (expected, 24, 40, 3)


def test_files_that_fail_do_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "bad.mp4").write_text("no video", encoding="utf-8")
    files = [
        str(tmp_path / "gone.mp4"),
        write_picture(tmp_path / "small.png", height=10, width=40),
        str(tmp_path / "bad.mp4"),
        write_picture(tmp_path / "good.png"),
    ]
    result = reconstruct(demo_settings(tmp_path, files))
    *failed, good = result.files
    assert isinstance(good, Reconstructed)
    assert [Path(row.file).name in row.error for row in failed if isinstance(row, Failed)] == [True, True, True]
    assert "40x10 pixels are too few for this autoencoder: it needs 12x12" in str(failed[1])
    with pytest.raises(BatchError, match="3 of 4 files could not be reconstructed") as caught:
        result.raise_for_problems()
    assert caught.value.exit_code == 5
    assert len(caught.value.message.split("\n")) == 4
    document = result.to_json()
    assert document["mean_psnr_db"] == good.psnr_db
    assert [*document["files"][0]] == ["file", "error"]  # type: ignore[index]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "good_reconstructed.png",
        "good_reconstructed.png.json",
    }


def test_one_file_out_of_memory_is_one_that_failed_and_a_bug_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"

    def fail(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError(reason)

    monkeypatch.setattr(HunyuanVAE, "encode_moments", fail)
    settings = demo_settings(tmp_path, [write_picture(tmp_path / "a.png")])
    [row] = reconstruct(settings).files
    assert "out of memory: use fewer clip.num_frames" in str(row)
    reason = "a bug"
    with pytest.raises(RuntimeError, match="a bug"):
        reconstruct(settings)


def test_an_interruption_says_what_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_picture(tmp_path / "a.png"), write_picture(tmp_path / "b.png", height=16)]
    encode = HunyuanVAE.encode_moments

    def interrupted(vae: HunyuanVAE, pixels_BCTHW: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        if pixels_BCTHW.shape[3] == 16:
            raise KeyboardInterrupt
        return encode(vae, pixels_BCTHW, **options)

    monkeypatch.setattr(HunyuanVAE, "encode_moments", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^finished: .*a_reconstructed\.png$"):
        reconstruct(demo_settings(tmp_path, files))
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".png"]


def test_a_result_never_takes_the_place_of_a_source(tmp_path: Path) -> None:
    files = [write_picture(tmp_path / "a.png"), write_picture(tmp_path / "a_reconstructed.png")]
    settings = demo_settings(tmp_path, files).replace({"output.folder": str(tmp_path), "output.overwrite": True})
    with pytest.raises(OutputError, match="is one of the files to be reconstructed"):
        reconstruct(settings)
