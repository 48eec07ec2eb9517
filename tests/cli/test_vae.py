"""`osora vae`: what it prints, and its exit codes."""

import json
from pathlib import Path

import pytest
import torch

from opensora_cli.cli.app import main
from opensora_cli.media.write import write_media


@pytest.fixture
def picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(48), indexing="ij")
    frame = torch.stack([100 + rows, 50 + columns, 90 + rows + columns], dim=-1).to(torch.uint8)
    write_media([frame[None]], "boat.png", fps=1, format="png")
    return "boat.png"


@pytest.mark.usefixtures("every_stage_takes_time")
def test_a_table_is_printed(picture: str, osora) -> None:
    captured = osora("vae", "reconstruct", picture, "-o", "compared", "--device", "cpu")
    header, row = captured.out.splitlines()
    assert header.split("  ")[0] == "PSNR dB (RGB)"
    assert row.split()[-2:] == ["48x32", "compared/boat_reconstructed.png"]
    assert Path("compared/boat_reconstructed.png.json").is_file()


def test_json_is_one_document(picture: str, osora) -> None:
    captured = osora("vae", "reconstruct", picture, "--json", "--quiet", "--no-metadata", "--device", "cpu")
    assert captured.err == ""
    document = json.loads(captured.out)
    assert document["schema"] == "osora.vae-reconstruct/2"
    [file] = document["files"]
    assert file["output"] == "reconstructed/boat_reconstructed.png"
    assert (file["width"], file["height"], file["num_frames"]) == (48, 32, 1)
    assert document["mean_psnr_db"] == file["psnr_db"] > 10
    assert document["mean_ssim"] == file["ssim"] > 0.3
    assert sorted(path.name for path in Path("reconstructed").iterdir()) == ["boat_reconstructed.png"]


def test_bad_files_end_the_batch_with_5(picture: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.mp4").write_text("nothing", encoding="utf-8")
    write_media([torch.zeros(1, 4, 4, 3, dtype=torch.uint8)], "small.png", fps=1, format="png")
    code = main(["vae", "reconstruct", "bad.mp4", picture, "small.png", "--json", "--quiet", "--device", "cpu"])
    captured = capsys.readouterr()
    assert code == 5
    files = json.loads(captured.out)["files"]
    assert ["error" in file for file in files] == [True, False, True]
    lines = captured.err.splitlines()
    assert lines[0] == "error: 2 of 3 files could not be reconstructed"
    assert "bad.mp4" in lines[1]
    assert "small.png" in lines[2]


def test_statistics_are_a_table_and_one_document(picture: str, osora) -> None:
    table = osora("vae", "stats", picture, "--device", "cpu", "--quiet").out.splitlines()
    assert table[0].split() == ["channel", "mean", "deviation"]
    assert [line.split()[0] for line in table[1:18]] == [*map(str, range(16)), "all"]
    # 12 x 8 latent pixels of 48 x 32.
    assert table[18] == "latents    96 values a channel, of 1 frames in 1 files"
    Path("bad.mp4").write_text("nothing", encoding="utf-8")
    captured = osora("vae", "stats", ".", "--device", "cpu", "--json", "--quiet", code=5)
    document = json.loads(captured.out)
    assert document["schema"] == "osora.vae-stats/1"
    assert [len(document["channels"]), document["files"], len(document["failed"])] == [16, 1, 1]
    assert f"{document['channels'][3]['mean']:.6f}" == table[4].split()[1]
    assert set(document["settings"]) == {"vae.scale_factor", "vae.shift_factor"}
    assert captured.err.splitlines()[0] == "error: 1 of 2 files could not be encoded, and do not count"
