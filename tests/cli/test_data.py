"""`osora data` and `osora train --check-data`: output, exit codes and schemas."""

import json
from pathlib import Path

import pytest
from tiny_clips import write_clip, write_rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "clips"
    folder.mkdir()
    for index in range(4):
        write_clip(folder / f"{index}.mp4", num_frames=6, caption=f"clip {index}")
    return folder


def test_from_a_folder_to_checked_data(folder: Path, run) -> None:
    code, out, _ = run("data", "scan", folder, "--quiet")
    table = folder.with_suffix(".csv")
    assert code == 0
    assert out.splitlines()[0] == f"table     {table}: 4 videos, 0 pictures"
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"target: vae\ndata:\n  table: {table}\n  buckets:\n    64px: {{5: [1.0, 2]}}\n")
    check = ("train", "--config", recipe, "--check-data")
    code, out, _ = run(*check, "--json")
    assert code == 0
    document = json.loads(out)
    assert (document["schema"], document["updates"]) == ("osora.data-check/3", 2)
    code, out, err = run(*check, "--set", "data.buckets={64px: {5: [1.0, 2], 9: [1.0, 2]}}")
    assert code == 3
    assert "64px x 9 frames" in out
    assert "bucket 64px x 9 frames is empty" in err


def test_broken_files_end_with_5_after_the_result(folder: Path, run) -> None:
    (folder / "broken.mp4").write_bytes(b"nothing")
    code, out, err = run("data", "scan", folder, "--json", "--out", folder / "table.csv")
    assert code == 5
    document = json.loads(out)
    assert (document["schema"], document["rows"], len(document["broken"])) == ("osora.data-scan/3", 4, 1)
    assert "1 file or folder cannot be read" in err


def test_a_table_is_split(folder: Path, run) -> None:
    rows = [[folder / f"{index}.mp4", "text", 6, 64, 64, 24] for index in range(4)]
    table = write_rows(folder / "table.csv", rows)
    parts = [folder / f"table_{part}-of-2.csv" for part in (1, 2)]
    assert run("data", "shard", table, "--parts", 2) == (0, "".join(f"{part}\n" for part in parts), "")
    code, _, err = run("data", "shard", table, "--parts", 2)
    assert (code, "use --overwrite" in err) == (3, True)
    assert run("data", "shard", table, "--parts", 2, "--overwrite", "--json")[0] == 0
    sheet = folder / "sheet.png"
    code, out, err = run("data", "preview", table, "-o", sheet, "--quiet")
    assert (code, out, err) == (0, f"{sheet}\n", "")
    assert run("data", "preview", table, "-o", sheet)[0] == 3
    code, out, _ = run("data", "preview", table, "-o", sheet, "--overwrite", "--json")
    assert (code, json.loads(out)["shown"]) == (0, 4)
