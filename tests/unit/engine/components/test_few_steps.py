"""Few-step adapters: the sampling that they ask for, and `--turbo`."""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_adapters import write_lora
from tiny_world import RecordingReporter

from opensora_cli.core.exceptions import CheckpointError, RequestError
from opensora_cli.engine.components.architectures import transformer_on_meta
from opensora_cli.engine.components.few_steps import METADATA_KEY, sampling_metadata
from opensora_cli.engine.components.weights import packaged_demo
from opensora_cli.engine.generate.dry_run import chain_to_plan
from opensora_cli.engine.generate.outputs import sample_files
from opensora_cli.engine.generate.plan import make_plan
from opensora_cli.engine.generate.request import picture_settings, refuse_early, resolve
from opensora_cli.engine.generate.sidecar import sample_settings
from opensora_cli.models.registry import DEMO
from opensora_cli.settings.applies import used_settings
from opensora_cli.settings.components import ModelSettings
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.layers import Given
from opensora_cli.settings.load import GenerateRequest, SavedSettings, usual_settings

FEW = {"num_inference_steps": 3, "timesteps": [1.0, 0.8, 0.4, 0.0], "solver": "euler", "guidance_scale": 1.0}


@cache
def demo_model() -> ModelSettings:
    return usual_settings(DEMO).model


def write_few_steps(folder: Path, metadata: dict[str, str] | None = None) -> Path:
    write_lora(folder, transformer_on_meta(demo_model()), like=r"single_blocks\.0\.linear2")
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata=sampling_metadata(DEMO, FEW) if metadata is None else metadata)
    return folder


def request(saved: SavedSettings | None = None, **given: object) -> GenerateRequest:
    values = {"prompt": "raining, sea", "runtime.model_choice": DEMO, "runtime.device": "cpu"} if saved is None else {}
    overrides = values | {key.replace("__", "."): value for key, value in given.items()}
    return GenerateRequest(overrides={key: Given(value, "test") for key, value in overrides.items()}, saved=saved)


def resolved(reporter: RecordingReporter | None = None, **given: object) -> GenerateSettings:
    return resolve(request(**given), reporter=reporter or RecordingReporter())


def test_an_adapter_brings_its_sampling(tmp_path):
    adapter, reporter = write_few_steps(tmp_path / "few"), RecordingReporter()
    sampling = resolved(reporter, loras=str(adapter)).sampling
    assert (sampling.num_inference_steps, sampling.guidance_scale) == (3, 1.0)
    assert sampling.timesteps == (1.0, 0.8, 0.4, 0.0)
    (line,) = [note for note in reporter.notes if note.startswith("adapter: ")]
    assert "asks for num_inference_steps=3, timesteps=1,0.8,0.4,0, solver=euler, guidance_scale=1" in line
    assert "instead" not in line


def test_what_the_user_sets_wins_and_is_named(tmp_path):
    adapter, reporter = write_few_steps(tmp_path / "few"), RecordingReporter()
    settings = resolved(reporter, loras=str(adapter), sampling__guidance_scale=2.5)
    assert (settings.sampling.num_inference_steps, settings.sampling.guidance_scale) == (3, 2.5)
    assert reporter.notes[-1].endswith("; used instead: sampling.guidance_scale=2.5")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"model": "demo"}', '{"model": "demo", "sampling": 3}']
    + [json.dumps({"model": DEMO, "sampling": FEW | change}) for change in ({"solver": "none"}, {"timesteps": [0.5]})],
)
def test_damaged_metadata_are_a_broken_file(tmp_path, text):
    adapter = write_few_steps(tmp_path / "few", metadata={METADATA_KEY: text})
    with pytest.raises(CheckpointError, match=f"the metadata {METADATA_KEY} are damaged"):
        resolved(loras=str(adapter))


def test_adapters_that_contradict_each_other_are_refused(tmp_path):
    paths = [write_few_steps(tmp_path / "three")]
    paths.append(write_few_steps(tmp_path / "other", metadata=sampling_metadata(DEMO, {"guidance_scale": 2.0})))
    with pytest.raises(RequestError, match=r"asks for guidance_scale=2, and .*three for 1"):
        resolved(loras=";".join(map(str, paths)))


def test_turbo_without_an_adapter_plans_four_steps_and_does_not_run(tmp_path):
    settings = resolved(sampling__turbo=True, files__turbo="missing")
    assert (settings.sampling.num_inference_steps, settings.sampling.guidance_scale) == (4, 1.0)
    with pytest.raises(CheckpointError, match="needs a few-step adapter of demo") as error:
        refuse_early(settings, dry_run=False)
    assert "osora train" in (error.value.hint or "")
    reporter = RecordingReporter()
    assert chain_to_plan(settings, reporter=reporter).video.model_evaluations == 4
    assert any("needs a few-step adapter" in warning for warning in reporter.warnings)


def test_turbo_takes_the_adapter_beside_the_weights_and_is_made_again(tmp_path):
    shutil.copy(packaged_demo() / "transformer.safetensors", tmp_path)
    adapter = write_few_steps(tmp_path / "turbo")
    settings = resolved(sampling__turbo=True, runtime__weights=str(tmp_path))
    refuse_early(settings, dry_run=False)
    plan = make_plan(settings)
    assert [lora.path for lora in plan.loras] == [adapter]
    assert plan.model_evaluations == 3
    recorded = used_settings(sample_settings(plan, sample_files(settings, 0)))
    assert recorded["sampling"]["turbo"] is True
    assert recorded["loras"] == []
    saved = SavedSettings(source="sidecar", values=recorded)
    again = resolve(request(saved, runtime__weights=str(tmp_path)), reporter=RecordingReporter())
    assert (again.sampling, again.loras) == (settings.sampling, ())
    assert [lora.sha256 for lora in make_plan(again).loras] == [plan.loras[0].sha256]


def test_a_picture_of_another_model_is_made_with_its_own_steps(tmp_path):
    adapter = write_few_steps(tmp_path / "few")
    given = {"loras": str(adapter), "picture__first": True, "picture__own_model": False, "sampling__seed": 7}
    picture = picture_settings(resolved(**given))
    assert picture is not None
    usual = usual_settings(DEMO).sampling
    assert (picture.loras, picture.sampling.seed) == ((), 7)
    assert picture.sampling.num_inference_steps == usual.num_inference_steps
    assert (picture.sampling.guidance_scale, picture.sampling.timesteps) == (usual.guidance_scale, None)
