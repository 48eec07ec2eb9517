"""What is left when a run ends early: results and latents stay, temporary files do not, and the way on is named."""

import errno
import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from stopping import continued
from tiny_world import RecordingReporter, demo_settings, names, released_settings

from opensora_cli.core import files as core_files
from opensora_cli.core.exceptions import CheckpointError, HardwareError, OutputError, RequestError
from opensora_cli.engine.estimate.offload import DENOISE, StageMemory
from opensora_cli.engine.generate import decode, denoise, models, outputs, references
from opensora_cli.engine.generate import text as generate_text
from opensora_cli.engine.generate.chain import make_chain
from opensora_cli.engine.generate.dry_run import plan_generation
from opensora_cli.engine.generate.events import Events, Hooks
from opensora_cli.engine.generate.models import LoadedModels
from opensora_cli.engine.generate.outputs import sample_files
from opensora_cli.engine.generate.pipeline import computing, make
from opensora_cli.engine.generate.request import with_mode
from opensora_cli.engine.generate.run import generate
from opensora_cli.engine.generate.sample import Sample, open_latents, save_latents
from opensora_cli.settings.layers import Given

pytestmark = pytest.mark.usefixtures("without_estimates")

ONE_MODEL = {"memory__offload": "model"}
"""Setting with which all samples are denoised before the first is decoded."""
LATENTS = "raining-sea_seed42.latents.safetensors"


def raising(error):
    def replacement(*_args, **_options):
        raise error

    return replacement


def go_on(path, reporter, **changes):
    return continued(path, reporter, key="from_latents", **changes)


SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(world, tmp_path_factory):
    """The video of a run that nothing interrupts."""
    return generate(released_settings(world, tmp_path_factory.mktemp("expected"))).videos[0].path.read_bytes()


class TestCtrlC:
    @pytest.mark.parametrize(
        ("module", "function"),
        [
            *(pytest.param(models, f"load_{model}", marks=SLOW) for model in ("t5", "transformer")),
            (generate_text, "encode_texts"),
            (references, "encode_references"),
            pytest.param(denoise, "denoise", marks=SLOW),
            (denoise, "save_latents"),
        ],
    )
    def test_before_any_latents(self, world, tmp_path, monkeypatch, module, function):
        monkeypatch.setattr(module, function, raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt) as caught:
            generate(released_settings(world, tmp_path, condition__references=str(world.picture)))
        assert caught.value.args == ("nothing was finished yet: run it again",)
        assert names(tmp_path) == []

    @pytest.mark.parametrize(
        ("module", "function"),
        [
            pytest.param(models, "load_autoencoder", marks=SLOW),
            (decode, "decode_latents"),
            pytest.param(decode, "write_media", marks=SLOW),
            pytest.param(decode, "sidecar_document", marks=SLOW),
        ],
    )
    def test_after_the_latents(self, world, tmp_path, monkeypatch, reporter, expected, module, function):
        with monkeypatch.context() as patched:
            patched.setattr(module, function, raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt) as caught:
                generate(released_settings(world, tmp_path / "out"))
        latents = tmp_path / "out" / LATENTS
        assert caught.value.args == (f"continue with: osora generate --from {latents} --weights {world.released}",)
        assert names(tmp_path / "out") == [LATENTS]
        video = go_on(latents, reporter).videos[0]
        assert video.path.read_bytes() == expected
        assert "denoise" not in reporter.stages
        assert names(tmp_path / "out") == [LATENTS, "raining-sea_seed42.mp4", "raining-sea_seed42.mp4.json"]

    def test_between_the_last_step_and_the_latents(self, world, tmp_path, monkeypatch):
        real = denoise._unpacked

        def interrupted(*args):
            signal.raise_signal(signal.SIGINT)
            return real(*args)

        monkeypatch.setattr(denoise, "_unpacked", interrupted)
        with pytest.raises(KeyboardInterrupt, match="continue with: osora generate --from"):
            generate(released_settings(world, tmp_path))
        assert open_latents(tmp_path / LATENTS).steps is None

    @pytest.mark.parametrize(("overwrite", "advice"), [("false", ": the same command continues"), ("true", "")])
    def test_what_is_finished_and_saved_is_listed(self, world, tmp_path, reporter, overwrite, advice):
        several = released_settings(world, tmp_path, sampling__num_samples="4", output__overwrite=overwrite)
        first, second, third, last = (sample_files(several, index, request_sha256="a") for index in range(4))
        state = tmp_path / "state.latents.safetensors"
        state.touch()
        first, events = replace(first, saved=state, saved_steps=1), Events(reporter)

        def interrupted():
            with events.rescue([first, second, third, last]):
                for sample, steps in ((first, None), (second, None), (third, 1)):
                    save_latents(sample.latents, torch.zeros(1), several, request_sha256="a", steps=steps)
                events.complete(first)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as caught:
            interrupted()
        assert caught.value.args[0].splitlines() == [
            f"finished: {first.media}",
            *(
                f"continue with: osora generate --from {sample.latents} --weights {world.released}"
                for sample in (second, third)
            ),
            f"still to be made: 1 of 4 samples{advice}",
        ]
        assert names(tmp_path) == sorted([state.name, second.latents.name, third.latents.name])

    def test_the_same_command_goes_on(self, world, tmp_path, monkeypatch, expected):
        """With a finished sample, one with saved latents, and one that is still to be made."""
        settings = released_settings(world, tmp_path, sampling__num_samples="3", **ONE_MODEL)
        generate(settings.replace({"sampling.num_samples": 1}))
        sample, denoised = denoise.sample_latents, []

        def last_time(*args, seed, **options):
            denoised.append(seed)
            if denoised == [43, 44]:
                raise KeyboardInterrupt
            return sample(*args, seed=seed, **options)

        monkeypatch.setattr(denoise, "sample_latents", last_time)
        with pytest.raises(KeyboardInterrupt):
            generate(settings)
        saved = tmp_path / "raining-sea_seed43.latents.safetensors"
        reporter = RecordingReporter()
        result = generate(settings, reporter=reporter)
        assert [note for note in reporter.notes if "same request" in note] == [
            f"made before by the same request: {tmp_path}/raining-sea_seed42.mp4",
            f"continuing from latents of the same request: {saved}",
        ]
        assert denoised == [43, 44, 44]
        assert [(video.seed, video.made_before) for video in result.videos] == [(42, True), (43, False), (44, False)]
        steps = settings.sampling.num_inference_steps
        assert result.model_evaluations == reporter.totals["denoise"] == 2 * steps
        assert names(tmp_path) == [f"raining-sea_seed{seed}.mp4{end}" for seed in (42, 43, 44) for end in ("", ".json")]
        assert (tmp_path / "raining-sea_seed42.mp4").read_bytes() == expected
        whole = generate(released_settings(world, tmp_path / "whole", sampling__seed="43", sampling__num_samples="2"))
        for video in whole.videos:
            assert (tmp_path / video.path.name).read_bytes() == video.path.read_bytes()


class TestFailures:
    def test_full_disk_while_saving_the_result(self, world, tmp_path, monkeypatch, reporter):
        real = core_files._flush_to_disk

        def full(path):
            if path.is_file() and b"ftyp" in path.read_bytes()[:16]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(path)

        monkeypatch.setattr(core_files, "_flush_to_disk", full)
        with pytest.raises(OutputError, match="No space left") as caught:
            generate(released_settings(world, tmp_path), reporter=reporter)
        assert caught.value.exit_code == 3
        assert names(tmp_path) == [LATENTS]
        assert reporter.warnings == [
            f"continue with: osora generate --from {tmp_path / LATENTS} --weights {world.released}"
        ]

    def test_space_is_checked_before_loading(self, world, tmp_path, monkeypatch, reporter):
        monkeypatch.setattr(models, "load_t5", lambda plan: pytest.fail("nothing may be loaded"))
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(outputs.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        for run in (generate, plan_generation):
            with pytest.raises(OutputError, match=r"0\.0 MiB free.*need 1\.\d MiB"):
                run(released_settings(world, tmp_path), reporter=reporter)

    def test_folder_that_cannot_be_written(self, world, tmp_path, monkeypatch, reporter):
        monkeypatch.setattr(models, "load_t5", lambda plan: pytest.fail("nothing may be loaded"))
        (tmp_path / "file").write_text("no folder")
        for output in (tmp_path / "file" / "sub", tmp_path / "file", tmp_path / "file" / "clip.mp4"):
            for run in (generate, plan_generation):
                with pytest.raises(OutputError, match="cannot write") as caught:
                    run(released_settings(world, output), reporter=reporter)
                assert "--out" in caught.value.hint
        assert names(tmp_path) == ["file"]

    def test_too_little_memory_is_reported_before_loading(self, world, tmp_path, monkeypatch, reporter):
        monkeypatch.setattr(models, "load_t5", lambda plan: pytest.fail("nothing may be loaded"))
        large = StageMemory(DENOISE, weight_bytes=2**30, data_bytes=0)
        monkeypatch.setattr("opensora_cli.engine.generate.plan.estimate_generation", lambda plan, offload: (large,))
        settings = released_settings(world, tmp_path / "out", memory__limit="10kB", memory__offload="none")
        with pytest.raises(HardwareError, match=r"memory\.limit allows 9\.77 KiB"):
            generate(settings, reporter=reporter)
        assert names(tmp_path) == []


class TestFromLatents:
    @pytest.fixture(scope="class")
    @classmethod
    def first(cls, world, tmp_path_factory):
        folder = tmp_path_factory.mktemp("first")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(models, "load_autoencoder", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                generate(demo_settings(world, folder, sampling__seed="5"))
        return folder / "raining-sea_seed5.latents.safetensors"

    @pytest.fixture
    def saved(self, first, tmp_path):
        return Path(shutil.copy(first, tmp_path))

    def test_settings_come_from_the_file_and_the_sidecar_is_that_of_an_uninterrupted_run(self, first, saved, reporter):
        result = go_on(saved, reporter)
        [video] = result.videos
        # Beside the latents, wherever they were made.
        assert first.parent != saved.parent
        assert video.path == saved.with_name("raining-sea_seed5.mp4")
        assert result.model == "demo"
        assert (result.settings.prompt, result.settings.sampling.seed) == ("raining, sea", 5)
        document = json.loads(video.sidecar.read_text())
        assert document["seed"] == 5
        assert "from_latents" not in document["settings"]
        # So that the request that was interrupted finds its result.
        assert document["request_sha256"] == open_latents(saved).request_sha256

    @pytest.mark.parametrize(
        ("key", "given", "shown"),
        [
            ("sampling.num_inference_steps", Given(9, "--steps"), "--steps 9"),
            ("condition.fit", Given("pad", "--set"), r"condition\.fit=pad \(from --set\)"),
            ("loras", Given("a", "--lora"), "--lora a"),
            ("prompt", Given("a bay", "PROMPT"), r"prompt=a bay \(from PROMPT\)"),
        ],
    )
    def test_what_decided_the_latents_is_refused_with_another_value(self, saved, reporter, key, given, shown):
        with pytest.raises(RequestError, match=f"{shown} has no effect with from_latents="):
            go_on(saved, reporter, **{key: given})

    def test_what_decided_the_latents_may_be_repeated(self, saved, tmp_path, reporter):
        changes = {"sampling.seed": Given(5, "--seed"), "prompt": Given("raining, sea", "PROMPT")}
        out = Given(str(tmp_path / "x.mp4"), "--out")
        assert go_on(saved, reporter, **changes, **{"output.path": out}).videos[0].path == tmp_path / "x.mp4"

    def test_no_such_file_or_a_truncated_one(self, tmp_path, saved, reporter):
        with pytest.raises(CheckpointError, match="does not exist"):
            go_on(tmp_path / "none.safetensors", reporter)
        whole = saved.read_bytes()
        for content in (b"", whole[:20], whole[:-1]):
            saved.write_bytes(content)
            with pytest.raises(CheckpointError, match="truncated or no safetensors file"):
                go_on(saved, reporter)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda latents: latents.to(torch.int64), r"holds latents of I64, not of F32, F16, BF16"),
            (lambda latents: latents.to(torch.float8_e4m3fn), r"holds latents of F8_E4M3, not of F32, F16, BF16"),
            (lambda latents: latents * math.nan, "holds latents that are not finite"),
            (lambda latents: latents.new_zeros(0), r"holds latents of \(0,\), and the settings ask for"),
            (lambda latents: latents[None], r"holds latents of \(1, 16, "),
        ],
    )
    def test_other_latents(self, saved, reporter, change, message):
        with safe_open(saved, framework="pt") as file:
            metadata, latents = file.metadata(), file.get_tensor("latents")
        save_file({"latents": change(latents).contiguous()}, saved, metadata=metadata)
        with pytest.raises((CheckpointError, RequestError), match=message):
            go_on(saved, reporter, **{"output.path": Given(str(saved.with_name("x.mp4")), "--out")})
        assert saved.exists()


def test_a_cancelled_run_saves_its_state_after_the_step(world, tmp_path, reporter):
    events = Events(reporter, hooks=Hooks(is_cancelled=lambda: True))
    chain = make_chain(with_mode(demo_settings(world, tmp_path), reporter)).with_threads()
    sample = Sample(chain, chain.video, sample_files(chain.settings, 0))
    with LoadedModels() as loaded, computing(chain.video, reporter), pytest.raises(KeyboardInterrupt):
        make(chain, [sample], loaded, events, finish=None)
    assert open_latents(tmp_path / LATENTS).steps == 1
