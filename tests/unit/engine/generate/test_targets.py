"""Names of results, without making any: free, taken, claimed, or of an earlier run of the same request."""

import json
import os
from contextlib import ExitStack

import numpy as np
import pytest
from safetensors.numpy import save_file

from opensora_cli.core.exceptions import CheckpointError, OutputError
from opensora_cli.engine.generate.outputs import find_target, is_begun, sample_files
from opensora_cli.engine.generate.sample import LATENTS_SCHEMA
from opensora_cli.settings.load import SIDECAR_SCHEMA, load_preset

NAME = "raining-sea_seed42"
SECOND = f"{NAME}_2.mp4"


@pytest.fixture
def settings(tmp_path):
    return load_preset("demo", prompt="raining, sea").replace({"output.path": str(tmp_path)})


def find(settings, request, *, claims=None):
    return find_target(settings, 0, request, claims=claims)


def make(sample, **changes):
    """Write the result of a sample."""
    sample.media.write_bytes(b"video")
    request = sample.request_sha256
    document = {"schema": SIDECAR_SCHEMA, "file": sample.media.name, "bytes": 5, "request_sha256": request}
    sample.sidecar.write_text(json.dumps({**document, **changes}))


def begin(path, request, **metadata):
    """Write the latents of a run that did not finish."""
    header = {"schema": LATENTS_SCHEMA, "settings": "{}", "request_sha256": request, **metadata}
    save_file({"latents": np.zeros(1, dtype=np.float32)}, path, metadata=header)


@pytest.mark.parametrize(
    ("path", "num_samples", "expected"),
    [
        ("", 2, ["raining-sea_seed42.mp4", "raining-sea_seed43.mp4"]),
        ("clip.mp4", 1, ["clip.mp4"]),
        ("clip.gif", 2, ["clip_000.gif", "clip_001.gif"]),
        ("clip.png", 1, ["clip"]),
        ("v1.5.png", 2, ["v1.5_000", "v1.5_001"]),
    ],
)
def test_names(settings, tmp_path, path, num_samples, expected):
    several = settings.replace({"output.path": str(tmp_path / path), "sampling.num_samples": num_samples})
    assert [sample_files(several, index).media.name for index in range(num_samples)] == expected


def test_a_result_of_the_same_request_is_kept_and_another_request_has_the_next_name(settings):
    for request, name in (("a", f"{NAME}.mp4"), ("b", SECOND)):
        sample = find(settings, request)
        assert (sample.media.name, sample.made_before) == (name, False)
        make(sample)
        again = find(settings, request)
        assert (again.media.name, again.made_before) == (name, True)


@pytest.mark.parametrize(
    "changes",
    [{"schema": "osora.other/1"}, {"bytes": 4}, {"bytes": None}, {"file": "b.mp4"}, {"request_sha256": "b"}],
)
def test_a_sidecar_that_does_not_fit_describes_no_result(settings, changes):
    make(find(settings, "a"), **changes)
    assert find(settings, "a").media.name == SECOND


@pytest.mark.parametrize("ending", [".mp4", ".mp4.json", ".latents.safetensors"])
def test_files_of_others_stay(settings, tmp_path, ending):
    path = tmp_path / f"{NAME}{ending}"
    path.write_text("mine")
    assert find(settings, "a").media.name == SECOND
    named = settings.replace({"output.path": str(tmp_path / f"{NAME}.mp4")})
    with pytest.raises(OutputError, match=f"{NAME}{ending} (exists already|is there from a run that did not finish)"):
        find(named, "a")


def test_a_sidecar_alone_is_an_unfinished_result(settings):
    sample = find(settings, "a")
    make(sample)
    sample.media.unlink()
    for request in "ab":
        again = find(settings, request)
        assert (again.media, again.made_before, is_begun(again)) == (sample.media, False, request == "a")


@pytest.mark.parametrize(("metadata", "steps"), [({}, None), ({"steps_done": "3"}, 3)])
def test_saved_latents_of_the_same_request_are_continued(settings, tmp_path, metadata, steps):
    latents = tmp_path / f"{NAME}.latents.safetensors"
    begin(latents, "a", **metadata)
    sample = find(settings, "a")
    assert (sample.media.name, sample.saved, sample.saved_steps) == (f"{NAME}.mp4", latents, steps)
    assert is_begun(sample)
    other = find(settings, "b")
    assert (other.media.name, other.saved) == (SECOND, None)
    with pytest.raises(OutputError) as caught:
        find(settings.replace({"output.path": str(tmp_path / f"{NAME}.mp4")}), "b")
    assert caught.value.hint.startswith(f"continue with osora generate --from {latents}")


def test_overwriting_replaces_the_result_of_the_same_request_or_the_first(settings):
    first, second = (find(settings, request) for request in "ab")
    make(first)
    second = find(settings, "b")
    make(second)
    overwriting = settings.replace({"output.overwrite": True})
    for unfinished in (False, True):
        if unfinished:
            second.media.unlink()
        for request, sample in (("a", first), ("b", second), ("c", first)):
            found = find(overwriting, request)
            assert (found.media, found.made_before) == (sample.media, False)


def test_resuming_needs_latents_of_the_same_request(settings, tmp_path):
    state = tmp_path / "state.safetensors"
    begin(state, "a", steps_done="2")
    resuming = settings.replace({"resume": str(state)})
    sample = find(resuming, "a")
    assert (sample.saved, sample.saved_steps) == (state, 2)
    with pytest.raises(CheckpointError, match="is of another request"):
        find(resuming, "b")
    make(sample)
    assert find(resuming, "a").made_before


def test_names_and_requests_are_claimed_until_the_end(settings, tmp_path):
    def refused(settings, request, message):
        with ExitStack() as others, pytest.raises(OutputError, match=f"{message}: process {os.getpid()} on "):
            find(settings, request, claims=others)

    with ExitStack() as claims:
        first = find(settings, "a", claims=claims)
        for same in (settings, settings.replace({"output.overwrite": True})):
            refused(same, "a", "another run is making the same result in .*")
        named = settings.replace({"output.path": str(first.media)})
        for request in "ab":
            refused(named, request, "is being made by another run")
        with ExitStack() as others:
            assert find(settings, "b", claims=others).media.name == SECOND
    make(first)
    with ExitStack() as claims:
        assert find(settings, "a", claims=claims).made_before
        # A finished result is not claimed.
        with ExitStack() as others:
            assert find(settings, "a", claims=others).made_before
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.media.name, first.sidecar.name]
