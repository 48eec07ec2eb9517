"""A generation or reconstruction that is killed at any step leaves what the same command finishes, without a flag."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import killing
import pytest
import torch
from small_stages import small_stages
from tiny_world import demo_settings, make_world, moving_frames

from opensora_cli.engine.generate import plan as generate_plan
from opensora_cli.engine.generate.run import generate
from opensora_cli.engine.vae.reconstruct import reconstruct
from opensora_cli.media.results import read_sidecar, result_bytes, sidecar_path
from opensora_cli.media.write import write_media
from opensora_cli.settings.explain import Given
from opensora_cli.settings.vae import ReconstructSettings, load_vae_settings

Make = Callable[[str, bool], object]
"""Makes the result of a request, `old` or `new`, which may replace another or not."""


def makers(folder: Path) -> dict[str, Make]:
    """Return what makes a result of each name in `folder / "out"`."""
    (folder / "world").mkdir()
    world = make_world(folder / "world")
    for shift, request in enumerate(("old", "new")):
        frames = moving_frames(5, height=32, width=32).roll(shift, 1)
        write_media([frames], folder / request / "a.mp4", fps=12, format="mp4")

    def generated(request: str, overwrite: bool) -> None:
        steps = {"old": "1", "new": "2"}[request]
        changes = {"sampling__num_inference_steps": steps, "output__overwrite": str(overwrite).lower()}
        [video] = generate(demo_settings(world, folder / "out" / "a.mp4", video__num_frames="5", **changes)).videos
        assert not video.made_before

    def reconstructed(request: str, overwrite: bool) -> None:
        files = {"files": Given((str(folder / request / "a.mp4"),), "FILE")}
        settings = load_vae_settings(ReconstructSettings, config=None, overrides=files, environment={})
        changes = {"output.folder": str(folder / "out"), "output.overwrite": overwrite, "runtime.device": "cpu"}
        reconstruct(settings.replace({**changes, "runtime.threads": 1})).raise_for_problems()

    return {"a.mp4": generated, "a_reconstructed.mp4": reconstructed}


def states_of_killed(folder: Path, name: str, make: Make, *, over: str) -> list[str]:
    """Return what was there after each death: `nothing`, a sidecar alone, `media` that are new with another sidecar, or
    a result of `old` or `new`.
    """
    out, kept, wanted = folder / "out", folder / "kept", dict[str, killing.Tree]()
    media = out / name
    for request in ("new", "old"):
        shutil.rmtree(out, ignore_errors=True)
        make(request, False)
        wanted[request] = killing.tree(media)
    shutil.rmtree(kept, ignore_errors=True)
    out.rename(kept)
    found: list[str] = []

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        if over == "old":
            shutil.copytree(kept, out)

    def state() -> str:
        if not media.exists():
            return "sidecar" if sidecar_path(media).exists() else "nothing"
        request = next(request for request, tree in wanted.items() if tree == killing.tree(media))
        if read_sidecar(sidecar_path(media))["bytes"] == result_bytes(media):
            return request
        assert request == "new"
        return "media"

    def check() -> None:
        found.append(state())
        if found[-1] in ("sidecar", "media") or found == ["nothing"]:
            make("new", found[-1] == "media")
            assert state() == "new"
            assert sorted(path.name for path in out.iterdir() if path.name[0] != ".") == [name, f"{name}.json"]

    killing.kill_at_every_step(prepare, lambda: make("new", over == "old"), check)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.mp4", "a_reconstructed.mp4"])
def test_what_a_kill_leaves_is_finished_by_the_same_command(tmp_path: Path, name: str) -> None:
    tests = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])}
    # In a process of its own: it forks, and counts what it writes.
    command = [sys.executable, __file__, str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    for before, found in report.items():
        order = [before, "media" if before == "old" else "sidecar", "new"]
        assert found == sorted(found, key=order.index)
        assert {*found} == {*order}


if __name__ == "__main__":
    torch.set_num_threads(1)
    generate_plan.estimate_generation = small_stages
    folder, name = Path(sys.argv[1]), sys.argv[2]
    make = makers(folder)[name]
    print(json.dumps({over: states_of_killed(folder, name, make, over=over) for over in ("nothing", "old")}))
