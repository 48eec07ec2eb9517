"""References: the mode that they suggest, what is read of them, and how well they come back."""

import math
from types import SimpleNamespace

import pytest
import torch
from tiny_world import RecordingReporter, moving_frames, released_settings

from opensora_cli.core.conditions import CONDITION_MODES, RELEASED_LENGTHS, ReferenceLengths, reference_parts
from opensora_cli.core.exceptions import MediaError, RequestError
from opensora_cli.engine.generate.chain import Chain
from opensora_cli.engine.generate.decode import Figures, report_given_frames
from opensora_cli.engine.generate.dry_run import plan_generation
from opensora_cli.engine.generate.events import Events
from opensora_cli.engine.generate.references import GivenFramesPSNR, Reference, read_references
from opensora_cli.engine.generate.request import with_mode
from opensora_cli.media.write import write_media

pytestmark = pytest.mark.usefixtures("without_estimates")


def read(paths, mode, lengths=RELEASED_LENGTHS, **options):
    """Return the references with the warnings about them."""
    reporter, mode = RecordingReporter(), CONDITION_MODES[mode]
    parts = reference_parts(mode, causal=True, temporal_compression=4, lengths=lengths)
    found = read_references(paths, mode, parts, height=16, width=32, reporter=reporter, **options)
    return found, reporter.warnings


@pytest.mark.parametrize(
    ("files", "mode"),
    [(["picture"], "i2v_head"), (["picture", "other_picture"], "i2v_loop"), (["video"], "v2v_head")],
)
def test_suggested_mode(world, tmp_path, reporter, files, mode):
    references = ";".join(str(getattr(world, name)) for name in files)
    settings = released_settings(world, tmp_path, condition__references=references, video__num_frames="37")
    assert with_mode(settings, reporter).condition.mode == mode
    [note] = reporter.notes
    assert note.startswith(f"condition: {mode}, which suits the ")


def test_no_mode_suits(world, tmp_path, reporter):
    settings = released_settings(world, tmp_path, condition__references=f"{world.video};{world.picture}")
    with pytest.raises(RequestError, match="no condition mode suits these 2 references") as caught:
        with_mode(settings, reporter)
    assert "--cond" in caught.value.hint


def test_broken_references_stop_the_dry_run(world, tmp_path, reporter):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    for mode in (None, "i2v_head"):
        settings = released_settings(
            world, tmp_path, condition__mode=mode, condition__references=str(tmp_path / "broken.png")
        )
        with pytest.raises(MediaError):
            plan_generation(settings, reporter=reporter)


def test_a_picture_for_a_video_mode_is_refused(world):
    with pytest.raises(MediaError, match="is a picture, not a video"):
        read([world.picture], "v2v_head")


def test_a_video_under_a_mode_for_pictures_is_reported(world):
    video, picture = world.video, world.picture
    for files in ([video], [picture, video]):
        _, [warning] = read(files, "i2v_loop")
        assert warning.startswith(f"{video} is a video, and i2v_loop takes single frames")
    assert read([picture], "i2v_loop")[1] == []


def test_a_reference_of_another_rate_is_warned_of(tmp_path):
    path = write_media([moving_frames(40)], tmp_path / "fast.gif", fps=20, format="gif")
    _, [warning] = read([path], "v2v_head", fps=10, lengths=ReferenceLengths(video=2))
    assert "20 frames a second and the video 10: what it shows will move at 50% of its speed" in warning
    assert f"ffmpeg -i {path} -r 10" in warning


@pytest.mark.parametrize(("psnr_db", "warns"), [(16.0, True), (23.9, True), (24.1, False)])
def test_given_frames_that_do_not_come_back_are_warned_of(reporter, psnr_db, warns):
    clip = SimpleNamespace(
        chain=Chain(()),
        files=SimpleNamespace(seed=7),
        events=Events(reporter),
        figures=lambda: Figures({}, {}, psnr_db),
    )
    report_given_frames(clip)
    [line] = reporter.warnings if warns else reporter.notes
    assert line.startswith(f"given frames came back at {psnr_db} dB PSNR (seed 7)")
    assert len(reporter.warnings + reporter.notes) == 1


@pytest.mark.parametrize("pieces", [[4], [1, 3], [1, 1, 1, 1]])
def test_psnr_of_given_frames(pieces):
    # Only the first and the last count.
    frames = torch.tensor([100, 0, 0, 100], dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 2, 2, 3)
    head = Reference(torch.full((3, 1, 2, 2), 110 / 127.5 - 1), at_head=True)
    tail = Reference(torch.full((3, 1, 2, 2), 100 / 127.5 - 1), at_head=False)

    def measured(*references):
        psnr = GivenFramesPSNR(references, num_frames=4)
        for piece in frames.split(pieces):
            psnr.add(piece)
        return psnr.db

    assert measured() is None
    assert measured(tail) == 99
    assert measured(head) == pytest.approx(10 * math.log10(255**2 / 100))
    assert measured(head, tail) == pytest.approx(10 * math.log10(255**2 / 50))
