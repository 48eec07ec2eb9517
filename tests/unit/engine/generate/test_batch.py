"""Many prompts in one run: the videos of single runs, what a rerun keeps, and rows that fail alone."""

import json
import os

import psutil
import pytest
from tiny_world import DEMO_SIZES, demo_settings

from opensora_cli.core import files as core_files
from opensora_cli.core.exceptions import BatchError, CheckpointError, InUseError, RequestError
from opensora_cli.engine.generate import batch, denoise
from opensora_cli.engine.generate import models as generate_models
from opensora_cli.engine.generate.batch import generate_rows, plan_rows
from opensora_cli.engine.generate.prompts import read_prompts
from opensora_cli.engine.generate.run import generate
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import GenerateRequest

pytestmark = pytest.mark.usefixtures("without_estimates")

ROWS = """prompt,seed,num_frames,ref,name
"raining, sea",7,5,,
desert,8,5,{picture},dunes
"raining, sea",9,5,{broken},
sea,7,x,,
"raining, sea",7,1,,
"""


@pytest.fixture
def asked(world, tmp_path):
    def request(**more):
        overrides = {
            **DEMO_SIZES,
            "video.num_frames": 17,
            "runtime.model_choice": "demo",
            "runtime.weights": str(world.demo),
            "runtime.threads": 1,
            "sampling.num_inference_steps": 2,
            "output.path": str(tmp_path / "out"),
            **{key.replace("__", "."): value for key, value in more.items()},
        }
        return GenerateRequest(overrides={key: Given(value, "the test") for key, value in overrides.items()})

    return request


@pytest.fixture
def rows_of(tmp_path):
    def write(text, *, kind="csv"):
        path = tmp_path / f"prompts.{kind}"
        path.write_text(text)
        return read_prompts(path)

    return write


def run(request, rows, reporter):
    return generate_rows(request, rows, reporter=reporter)


def test_rows_are_made_as_alone_and_bad_ones_are_reported(world, tmp_path, asked, rows_of, reporter, monkeypatch):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    rows = rows_of(ROWS.format(picture=world.picture, broken=tmp_path / "broken.png"))
    result = run(asked(), rows, reporter)
    assert [path.name for path in result.outputs] == ["raining-sea_seed7.mp4", "dunes.mp4", "raining-sea_seed7.png"]
    assert (result.rows, result.made, result.kept) == (5, 3, 0)
    broken, wrong = result.failed
    assert (broken.row, broken.prompt) == (3, "raining, sea")
    assert "broken.png" in broken.error
    assert (wrong.row, wrong.error) == (4, "video.num_frames=x must be a whole number (from column num_frames)")
    with pytest.raises(BatchError, match=r"2 of 5 rows failed\nrow 3: .*broken\.png.*\nrow 4: video\.num_frames=x"):
        result.raise_for_problems()
    alone = demo_settings(
        world, tmp_path / "alone", prompt="desert", sampling__seed=8, video__num_frames=5, runtime__threads=1,
        condition__references=str(world.picture),
    )  # fmt: skip
    [video] = generate(alone).videos
    assert video.path.read_bytes() == result.outputs[1].read_bytes()
    assert json.loads((tmp_path / "out" / "dunes.mp4.json").read_text())["given_frames_psnr_db"] is not None

    assert reporter.totals["rows"] == reporter.advanced["rows"] == 5

    # A rerun computes only what is missing.
    result.outputs[0].unlink()
    evaluated = []
    sample = denoise.sample_latents
    monkeypatch.setattr(denoise, "sample_latents", lambda *a, **k: evaluated.append(k["seed"]) or sample(*a, **k))
    again = run(asked(), rows, reporter)
    assert (again.made, again.kept, len(again.failed)) == (1, 2, 2)
    assert again.outputs == result.outputs
    assert evaluated == [7]
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == sorted(
        [".mp4", ".mp4", ".png", *[".json"] * 3]
    )


def test_encoders_are_loaded_once_where_nothing_stays(asked, rows_of, reporter, monkeypatch):
    loads = []
    for name in ("load_t5", "load_transformer"):
        original = getattr(generate_models, name)

        def counted(*args, original=original, name=name, **options):
            loads.append(name)
            return original(*args, **options)

        monkeypatch.setattr(generate_models, name, counted)
    result = run(
        asked(memory__offload="model", video__num_frames=1), rows_of("sea\ndesert\nrain", kind="txt"), reporter
    )
    assert result.made == 3
    assert loads.count("load_t5") == 1
    assert any(line.startswith("row 3: the demo model does not know") for line in reporter.warnings)


def test_many_rows_are_planned_once_for_each_shape(tmp_path, asked, reporter, monkeypatch):
    path = tmp_path / "p.csv"
    path.write_text("prompt,seed,num_frames\n" + "".join(f"sea,{seed},{5 + seed % 2 * 12}\n" for seed in range(100)))
    planned = []
    plan = batch.plan_generation
    monkeypatch.setattr(batch, "plan_generation", lambda *a, **k: planned.append(a) or plan(*a, **k))
    result = plan_rows(asked(), read_prompts(path), reporter=reporter)
    assert len(planned) == 2
    assert [(shape.rows, shape.plan.jobs[0].num_frames) for shape in result.shapes] == [(50, 5), (50, 17)]
    assert result.lines()[-1] == "rows      100 of 2 shapes, and 0 that would be refused"


def test_a_rerun_of_finished_rows_removes_files_of_a_killed_run(asked, rows_of, reporter, monkeypatch):
    rows = rows_of("sea\ndesert\n", kind="txt")
    request = asked(video__num_frames=1)
    left = run(request, rows, reporter).outputs[0].with_name(".osora-0123456789abcdef.lock")
    left.touch()
    monkeypatch.setattr(core_files, "_looked_through", set())  # as in another process
    whole = run(request, rows, reporter)
    assert (whole.made, whole.kept) == (0, 2)
    assert not left.exists()


def test_rows_that_another_process_makes_are_waited_for(asked, rows_of, reporter, monkeypatch):
    rows, request = rows_of("sea\ndesert\n", kind="txt"), asked(video__num_frames=1)
    generate_alone, busy, order = batch.generate, ["sea", "sea"], []

    def generate_beside_another(settings, **options):
        order.append(settings.prompt)
        if settings.prompt in busy:
            busy.remove(settings.prompt)
            raise InUseError("another run is making the same result")
        return generate_alone(settings, **options)

    monkeypatch.setattr(batch, "generate", generate_beside_another)
    monkeypatch.setattr(batch, "_LOOK_S", 0.0)
    result = run(request, rows, reporter)
    assert order == ["sea", "desert", "sea", "sea"]
    assert (result.made, result.failed, [path.stem for path in result.outputs]) == (
        2, (), ["sea_seed42", "desert_seed42"],
    )  # fmt: skip


def test_names_for_evaluation(asked, rows_of, reporter):
    request = asked(video__num_frames=1, sampling__num_samples=2, output__name_from="prompt")
    result = run(request, rows_of("A cat, and a dog.\n", kind="txt"), reporter)
    assert [path.name for path in result.outputs] == ["A cat, and a dog.-0.png", "A cat, and a dog.-1.png"]
    assert run(request, rows_of("A cat, and a dog.\n", kind="txt"), reporter).kept == 1


def test_what_is_wrong_with_every_row_is_wrong_with_the_request(tmp_path, asked, rows_of, reporter):
    rows = rows_of("sea\ndesert\n", kind="txt")
    for changes, error, message in (
        ({"sampling.num_inference_steps": "x"}, RequestError, "num_inference_steps=x must be a whole number"),
        ({"output.path": str(tmp_path / "a.mp4")}, RequestError, "is one file: name a folder"),
        (
            {"parallel.gpus": 2, "runtime.device": "cpu", "parallel.ulysses_degree": 2},
            RequestError,
            "each of the 2 devices makes videos of its own, and parallel.ulysses_degree=2 lets some share one",
        ),
        ({"files.transformer": "gone.safetensors"}, CheckpointError, "gone.safetensors"),
    ):
        with pytest.raises(error, match=message):
            run(asked(**{key.replace(".", "__"): value for key, value in changes.items()}), rows, reporter)
    assert not (tmp_path / "out").exists()


def test_ctrl_c_says_how_much_is_finished(asked, rows_of, reporter, monkeypatch):
    generate_alone = batch.generate

    def interrupt(settings, **options):
        if settings.prompt == "desert":
            raise KeyboardInterrupt
        return generate_alone(settings, **options)

    monkeypatch.setattr(batch, "generate", interrupt)
    with pytest.raises(KeyboardInterrupt, match="1 of 2 rows are finished: the same command continues"):
        run(asked(video__num_frames=1), rows_of("sea\ndesert\n", kind="txt"), reporter)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_clips_take_no_more_memory_and_files_than_a_hundred(asked, rows_of, reporter):
    process = psutil.Process()
    rows = rows_of("prompt,seed\n" + "".join(f"sea,{seed}\n" for seed in range(1000)))
    seen = []
    original = reporter.advance

    def advance(amount=1):
        original(amount)
        if reporter.advanced["rows"] % 100 == 0:
            seen.append((process.memory_info().rss, process.num_fds()))

    reporter.advance = advance
    result = run(asked(video__num_frames=5, sampling__num_inference_steps=1), rows, reporter)
    assert result.made == 1000
    assert len(os.listdir(result.outputs[0].parent)) == 2000
    (first, files), *_, (last, files_at_the_end) = seen
    assert files_at_the_end == files
    assert last < first * 1.05 + 2**24
