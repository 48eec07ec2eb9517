import torch

from opensora_cli.media.sheets import enlarged, film_strip


def frames(count, height=4, width=6):
    return torch.arange(count, dtype=torch.uint8).reshape(-1, 1, 1, 1).expand(count, height, width, 3).clone()


def test_frames_are_made_larger_by_whole_numbers():
    larger = enlarged(frames(2) + 7, longest_side=20)
    assert (larger.shape, larger.dtype) == ((2, 12, 18, 3), torch.uint8)
    assert larger[0].unique().tolist() == [7]
    assert torch.equal(enlarged(frames(2), longest_side=5), frames(2))


def test_a_strip_has_the_ends_and_the_middle():
    assert film_strip(frames(9))[0, ::6, 0].tolist() == [0, 4, 8]
    assert film_strip(frames(1)).shape == (4, 6, 3)
    assert film_strip(frames(2))[0, ::6, 0].tolist() == [0, 1]
