import torch

from opensora_cli.media.resize import enlarged
from opensora_cli.media.write import contact_sheet, film_strip


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


def test_a_sheet_has_each_picture_below_its_label():
    white = torch.full((64, 192, 3), 255, dtype=torch.uint8)
    sheet = contact_sheet([("seed 1", white), ("seed 2", None), ("seed 3", white // 2)])
    # Two columns of cells of 192 + 8 by 64 + 16 + 8, with a margin of 8.
    assert sheet.shape == (8 + 2 * 88, 8 + 2 * 200, 3) or sheet.shape == (8 + 3 * 88, 8 + 200, 3)
    columns = (sheet.shape[1] - 8) // 200
    places = [(24 + index // columns * 88, 8 + index % columns * 200) for index in range(3)]
    shown = [sheet[top : top + 64, left : left + 192] for top, left in places]
    assert [part.unique().tolist() for part in shown] == [[255], [32], [127]]
    labels = [sheet[top - 16 : top, left : left + 192] for top, left in places]
    assert [int(label.max()) > 200 for label in labels] == [True] * 3
    assert not torch.equal(labels[0], labels[1])
