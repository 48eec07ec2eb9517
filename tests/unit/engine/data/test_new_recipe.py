"""Recipes for folders: they are valid, and take in every clip."""

from pathlib import Path
from typing import Any

import pytest
import tiny_training
from tiny_clips import write_clip, write_rows

from opensora_cli.cli.app import main
from opensora_cli.core.exceptions import FileProblem, OutputError, RequestError
from opensora_cli.core.progress import SilentReporter
from opensora_cli.data.table import read_table
from opensora_cli.engine.data.check import check_data, suggest_buckets, write_recipe
from opensora_cli.engine.train import plan as train_plan
from opensora_cli.engine.train.plan import plan_training
from opensora_cli.settings.layers import Given, list_presets
from opensora_cli.settings.train import TrainSettings, load_train_settings

Row = tuple[int, int, int, float | str]
"""Frames, height, width, fps."""

MIXED: list[Row] = [
    *[(40, 360, 640, 30.0)] * 5,
    *[(200, 720, 1280, 60.0)] * 2,
    (5, 64, 64, 12.0),
    (9, 640, 360, 240.0),
    (33, 40, 40, 25.0),
    (1, 512, 512, ""),
    (1, 48, 40, ""),
    (61, 500, 200, ""),
]


def load(name: str, **overrides: Any) -> TrainSettings:
    given = {key.replace("__", "."): Given(value, "a test") for key, value in overrides.items()}
    return load_train_settings(config=Path(name), overrides=given, environment={})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Videos of several sizes, rates and lengths, and pictures."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "it's mine"
    folder.mkdir()
    for index, (frames, height, width, fps) in enumerate(
        [(40, 72, 128, 30), (40, 72, 128, 30), (6, 64, 64, 12), (10, 128, 72, 60), (20, 48, 48, 24), (1, 80, 64, 1)]
    ):
        name = f"{index}.{'png' if frames == 1 else 'mp4'}"
        write_clip(folder / name, num_frames=frames, height=height, width=width, fps=fps, caption="a clip")
    return folder


def test_the_recipe_of_a_mixed_folder_takes_in_every_clip(folder, monkeypatch, capsys):
    # It takes seconds, and has tests of its own.
    monkeypatch.setattr(train_plan, "estimate_rank", lambda settings, *, reporter: tiny_training.rank_memory())
    assert main(["train", "--new", folder.name, "--quiet"]) == 0
    out = capsys.readouterr().out
    recipe = Path(f"{folder.name}.yaml")
    assert out.splitlines()[0] == f"recipe    {recipe}"
    settings = load(str(recipe))
    report = check_data(settings, reporter=SilentReporter())
    assert (report.rows, report.unused, report.problems, report.bad_rows) == (6, (), (), ())
    assert sum(bucket.samples for bucket in report.buckets) == 6
    assert (settings.init, settings.lora.rank, settings.output) == ("demo", 8, f"runs/{folder.name}")
    assert main(["train", "--config", str(recipe), "--dry-run"]) == 0
    assert main(["train", "--config", str(recipe), "--check-data", "--quiet"]) == 0
    before = recipe.read_bytes()
    capsys.readouterr()
    assert main(["train", "--new", folder.name, "--quiet"]) == 3
    assert "exists already" in capsys.readouterr().err
    assert recipe.read_bytes() == before


@pytest.mark.parametrize("base", list_presets("train"))
def test_every_recipe_with_clips_can_be_the_base(base, tmp_path):
    """A row that has enough frames and pixels is in a micro-batch of the first epoch."""
    settings = load(base, output=str(tmp_path / "run"))
    rows = [row for row in MIXED if row[0] == 1 or row[0] >= settings.vae.grid.num_frames(2)]
    names = [f"{index}.mp4" for index in range(len(rows))]
    for name in names:
        (tmp_path / name).touch()
    table = write_rows(tmp_path / "t.csv", [[name, "", *row] for name, row in zip(names, rows, strict=True)])
    buckets, fps_max, unfit = suggest_buckets(read_table(table).samples, settings)
    plain = {name: {n: list(bucket) for n, bucket in rest.items()} for name, rest in buckets.items()}
    data = {"table": str(table), "buckets": plain, "fps_max": fps_max}
    changed = TrainSettings.model_validate(
        {"target": "vae", "vae": settings.vae.model_dump(mode="json"), "data": data}
        if settings.target == "vae"
        else {**settings.model_dump(mode="json"), "data": data, "train_mmdit": {"mode_weights": _T2V}}
    )
    report = check_data(changed, reporter=SilentReporter())
    left = sum(each.rows for each in report.unused)
    # A token of the DC-AE is 32 pixels wide, and one recipe is for pictures alone.
    most = 2 if settings.vae.grid.spatial_compression_ratio > 8 else len(rows) - 2 if base == "image" else 0
    assert left == unfit <= most
    assert sum(bucket.samples for bucket in report.buckets) == len(rows) - left
    assert all(bucket.micro_batches for bucket in report.buckets)


_T2V = {mode: 0 for mode in ("i2v_head", "i2v_tail", "i2v_loop", "v2v_head", "v2v_tail", "v2v_head_easy")}
_T2V |= {"v2v_tail_easy": 0, "t2v": 1}


def test_only_pictures_and_only_short_videos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, frames in (("pictures", 1), ("short", 5)):
        (tmp_path / name).mkdir()
        for index in range(2):
            write_clip(tmp_path / name / f"{index}.{'png' if frames == 1 else 'mp4'}", num_frames=frames)
        result = write_recipe(name, Path("demo_lora"))
        assert (result.data.unused, result.data.problems, result.data.updates) == ((), (), 1)
        assert set(load(f"{name}.yaml").data.lengths()) == {frames}
        plan_training(load(f"{name}.yaml"))
    assert set(load("pictures.yaml").train_mmdit.mode_weights.by_mode()) == {"t2v"}


def test_what_fits_no_bucket_is_counted_in_the_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clips").mkdir()
    write_clip(tmp_path / "clips" / "a.mp4", num_frames=3)
    with pytest.raises(FileProblem, match="clips has nothing large and long enough"):
        write_recipe("clips", Path("demo_lora"))
    write_clip(tmp_path / "clips" / "b.mp4", num_frames=9)
    (tmp_path / "clips" / "c.mp4").write_bytes(b"nothing")
    with pytest.raises(FileProblem, match="clips has nothing large and long enough"):
        write_recipe("clips", Path("demo_lora"))  # from the table of the first scan
    (tmp_path / "clips.csv").unlink()
    result = write_recipe("clips", Path("demo_lora"))
    assert "c.mp4" in result.broken[0].reason
    assert any(line.startswith("broken ") for line in result.lines())
    assert "# Skipped, too small or too short for any bucket: 1." in result.recipe.read_text()
    assert [each.rows for each in result.data.unused] == [1]


def test_bad_requests(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="a file of the reference"):
        write_recipe("clips", Path("stage1.py"))
    with pytest.raises(FileProblem, match="clips does not exist"):
        write_recipe("clips", Path("demo_lora"))
    Path("clips.yaml").write_text("mine")
    with pytest.raises(OutputError, match="exists already"):
        write_recipe("clips", Path("demo_lora"))
    for flags in (["--set", "loop.steps=3"], ["--dry-run"], ["--gpus", "2"], ["--resume"]):
        assert main(["train", "--new", "clips", *flags]) == 2
        assert f"{flags[0]} has no effect with --new" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["clips.yaml"]
