"""Files of prompts: what their rows ask for, and what is wrong with a file or a row."""

import re

import pytest

from opensora_cli.core.exceptions import FileProblem, RequestError
from opensora_cli.engine.generate.prompts import Row, read_prompts, rows_of_shard
from opensora_cli.settings.layers import Given


def test_a_table_gives_each_row_its_settings(tmp_path):
    path = tmp_path / "prompts.csv"
    path.write_text('prompt,seed,num_frames,name\n"raining, sea",3,5,wet\n"a ""quoted"" desert"\n', "utf-8-sig")
    first, second = read_prompts(path)
    assert (first.number, first.prompt, first.name, first.problem) == (1, "raining, sea", "wet", None)
    assert int(first.given["sampling.seed"].value) == 3
    frames = first.given["video.num_frames"]
    assert (int(frames.value), frames.source) == (5, "column num_frames")
    assert second == Row(2, {"prompt": Given('a "quoted" desert', "column prompt")})


def test_a_text_has_a_prompt_a_line(tmp_path):
    (tmp_path / "p.txt").write_text("\ufeffraining, sea\n\n  desert, dry \n", "utf-8")
    assert [row.prompt for row in read_prompts(tmp_path / "p.txt")] == ["raining, sea", "desert, dry"]


def test_files_are_found_from_the_folder_of_the_table(tmp_path):
    (tmp_path / "a.png").touch()
    (tmp_path / "p.csv").write_text("prompt,ref\nsea,a.png; a.png\n")
    [row] = read_prompts(tmp_path / "p.csv")
    assert row.given["condition.references"].value == (str(tmp_path / "a.png"),) * 2


def test_a_table_of_the_reference_has_its_prompts_in_a_column_text(tmp_path):
    (tmp_path / "p.csv").write_text("text,seed\nsea,1\n")
    [row] = read_prompts(tmp_path / "p.csv")
    assert (row.prompt, row.problem) == ("sea", None)


@pytest.mark.parametrize("header", ["", "Unnamed: 0", " "])
def test_a_column_that_numbers_the_rows_is_ignored(tmp_path, header):
    (tmp_path / "p.csv").write_text(f"{header},prompt,seed\n0,sea,1\n1,desert,2.0\n")
    assert [(row.prompt, row.problem, len(row.given)) for row in read_prompts(tmp_path / "p.csv")] == [
        ("sea", None, 2),
        ("desert", None, 2),
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (" ,", "prompt is empty"),
        ("a,../a", r"name=\.\./a must be the name of a file"),
        ("a," + "x" * 201, "at most 200 bytes"),
        ("a,good", "name=good is that of row 1"),
        ("raining, sea,", "it has 3 cells, and the table 2 columns: quote a text that has commas in it"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_used_says_why(tmp_path, row, problem):
    (tmp_path / "p.csv").write_text(f"prompt,name\na,good\n{row}\n")
    good, bad = read_prompts(tmp_path / "p.csv")
    assert good.problem is None
    assert re.search(problem, bad.problem)


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("p.csv", "prompt,sede\na,1\n", RequestError, "there is no column sede"),
        ("p.csv", "prompt,out\na,b\n", RequestError, "out is the same for all rows"),
        ("p.csv", "prompt,parallel.gpus\na,2\n", RequestError, "is the same for all rows"),
        ("p.csv", "prompt,prompt\na,b\n", FileProblem, "two columns prompt"),
        ("p.csv", "seed\n1\n", FileProblem, "has no column prompt; it has seed"),
        ("p.csv", "prompt\n", FileProblem, "has no rows"),
        ("p.csv", "", FileProblem, "is empty"),
        ("p.txt", "\n \n", FileProblem, "has no rows"),
        ("p.txt", b"\xff\xfe\x00", FileProblem, "is not text in UTF-8"),
        ("p.json", "[]", RequestError, r"must end in \.txt or \.csv"),
    ],
    ids=str,
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, name, text, error, message):
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(error, match=message) as caught:
        read_prompts(tmp_path / name)
    if "sede" in message:
        assert caught.value.hint == "did you mean seed?"


def test_shards_divide_the_rows():
    rows = [Row(number) for number in range(1, 8)]
    parts = [[row.number for row in rows[rows_of_shard(f"{index}/3")]] for index in (1, 2, 3)]
    assert parts == [[1, 4, 7], [2, 5], [3, 6]]
    for wrong in ("", "3", "0/3", "4/3", "a/b", "1/", "-1/2"):
        with pytest.raises(RequestError, match="--shard"):
            rows_of_shard(wrong)


def test_settings_are_named_by_their_keys(tmp_path):
    (tmp_path / "p.csv").write_text("prompt,sampling.flow_shift\na,3\nb,\n")
    first, second = read_prompts(tmp_path / "p.csv")
    assert first.given["sampling.flow_shift"] == Given("3", "column sampling.flow_shift")
    assert second.given.keys() == {"prompt"}
