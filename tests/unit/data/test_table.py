"""Reading, writing and splitting tables."""

import math
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest
from hostile_files import parquet_tables
from tiny_clips import write_rows

from opensora_cli.core.exceptions import FileProblem
from opensora_cli.data import table as tables
from opensora_cli.data.table import COLUMNS, read_columns, read_rows, read_table, split_table, write_table

KINDS = pytest.mark.parametrize("kind", [".csv", ".parquet"])
ROWS: list[tuple[object, ...]] = [
    ("a.mp4", 'a boat, "red"\nat sea', 40, 48, 64, 0.75, 3072, 24.0),
    ("/b/ü.png", "", 1, 64, 48, 1.333333, 3072, None),
]


@KINDS
def test_what_is_written_is_read(tmp_path, kind):
    if kind == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"table{kind}"
    write_table(path, COLUMNS, ROWS)
    table = read_table(path)
    assert len(table) == 2
    assert [table.paths[0], table.paths[1]] == ["a.mp4", "/b/ü.png"]
    assert [table.texts[0], table.texts[1]] == [ROWS[0][1], ""]
    assert [table.file(0), table.file(1)] == [tmp_path / "a.mp4", Path("/b/ü.png")]
    assert table.samples.num_frames.tolist() == [40, 1]
    assert (table.samples.height.tolist(), table.samples.width.tolist()) == ([48, 64], [64, 48])
    assert table.samples.fps[0] == 24.0
    assert math.isnan(table.samples.fps[1])
    assert [table.motion_score(0), table.motion_score(1)] == [None, None]
    assert table.bad_rows == ()


def test_rows_that_make_no_sense_are_told_and_left_out(tmp_path):
    good = ["good.mp4", "text", 5, 64, 64, 24, 3]
    rows = [
        good,
        ["", "text", 5, 64, 64, 24, 3],
        ["no_frames.mp4", "text", 0, 64, 64, 24, 3],
        ["half.mp4", "text", 5, 64.5, 64, 24, 3],
        ["words.mp4", "text", 5, 64, "wide", 24, 3],
        ["backwards.mp4", "text", 5, 64, 64, -24, 3],
        ["endless.mp4", "text", 5, 64, 64, "inf", 3],
        ["short.mp4", "text"],
        ["unmoved.mp4", "text", 5, 64, 64, 24, 0],
        ["dull.mp4", "text", 5, 64, 64, 24, -1],
        ["floats.mp4", "text", "5.0", "64.0", 64, "nan", ""],
    ]
    columns = ["path", "text", "num_frames", "height", "width", "fps", "motion_score"]
    table = read_table(write_rows(tmp_path / "table.csv", rows, columns=columns))
    assert [table.paths[index] for index in range(3)] == ["good.mp4", "unmoved.mp4", "floats.mp4"]
    assert [table.motion_score(index) for index in range(3)] == [3.0, 0.0, None]
    assert [(bad.row, bad.path) for bad in table.bad_rows] == [(row + 1, rows[row][0]) for row in (*range(1, 8), 9)]
    reasons = [bad.reason for bad in table.bad_rows]
    assert reasons[0] == "path is empty"
    assert reasons[3] == "width=wide must be a whole number over 0"
    assert reasons[4] == "fps=-24 must be a number over 0"
    assert reasons[6].startswith("num_frames=None")
    assert reasons[7] == "motion_score=-1 must be a number of at least 0"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"path,num_frames\na.mp4,5\n", "has no column text and no height and no width; it has path, num_frames"),
    ],
)
def test_tables_without_what_is_needed(tmp_path, content, message):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(FileProblem, match=message):
        read_table(path)


def test_damaged_parquet_is_refused_in_a_line_that_names_it(tmp_path):
    pytest.importorskip("pyarrow")
    cells = {"path": ["a.mp4", "b.mp4"], "text": ["x", "y"]} | {name: [8, 8] for name in COLUMNS[2:5]}
    parts = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    for name, content in parquet_tables(cells).items():
        path = tmp_path / "table.parquet"
        path.write_bytes(content)
        try:
            read_table(path)
        except FileProblem as error:
            message = error.message
        else:
            pytest.fail(name)
        assert str(path) in message, name
        assert message.isprintable(), name
        with suppress(FileProblem):  # that it has other cells than a table of clips does not matter to its parts
            split_table(path, parts)


def test_a_small_parquet_file_that_claims_a_gigantic_table_is_refused_before_it_is_read(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "table.parquet"
    cells = {"path": ["a.mp4"], "text": ["x"]} | {name: [8] for name in COLUMNS[2:5]}
    many = pyarrow.table({name: pyarrow.repeat(value[0], 1_100_000) for name, value in cells.items()})
    pyarrow.parquet.write_table(many, path)
    assert path.stat().st_size < 50_000
    for read in (read_table, lambda path: split_table(path, [tmp_path / "1.parquet"]), read_rows):
        with pytest.raises(FileProblem, match="claims 1,100,000 rows and"):
            read(path)
    monkeypatch.setattr(tables, "_LITTLE_BYTES", 0)
    cells["text"] = ["x" * 3_000_000]
    pyarrow.parquet.write_table(pyarrow.table(cells), path, compression="zstd", write_statistics=False)
    with pytest.raises(FileProblem, match=r"claims 1 rows and 3,0\d\d,\d\d\d bytes in a file of \d,\d\d\d bytes"):
        read_table(path)


@pytest.mark.parametrize("kind", ["repeated", "in lists", "with shared beginnings"])
def test_a_small_parquet_file_of_a_long_repeated_text_is_refused_before_it_is_copied(tmp_path, monkeypatch, kind):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(tables, "_LITTLE_BYTES", 2_000_000)
    path, texts = tmp_path / "table.parquet", ["x" * 100_000] * 200
    cells = [[text] for text in texts] if kind == "in lists" else texts
    options = {} if kind != "with shared beginnings" else {"column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    table = pyarrow.table({"path": ["a.mp4"] * len(cells), "text": cells})
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=not options, **options)
    assert path.stat().st_size < 20_000
    before = pyarrow.total_allocated_bytes()
    for read in (
        lambda: read_columns(path, ["text"]),
        lambda: list(read_rows(path)[1]),
        lambda: split_table(path, [tmp_path / "1.parquet"]),
    ):
        with pytest.raises(FileProblem, match="has far more text in 200 rows than its"):
            read()
    assert pyarrow.total_allocated_bytes() <= before
    assert read_columns(path, ["path"]) == {"path": ["a.mp4"] * len(cells)}


def test_parquet_sizes_of_other_types_are_bad_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    write = pytest.importorskip("pyarrow.parquet").write_table
    row = {"path": ["a.mp4"], "text": ["x"]} | {size: [8] for size in COLUMNS[2:5]}
    for wrong in ("tall", [64], {"a": 1}, datetime(2026, 1, 1), Decimal("9" * 38), math.nan, None):
        write(pyarrow.table({**row, "height": [wrong]}), tmp_path / "table.parquet")
        table = read_table(tmp_path / "table.parquet")
        assert (len(table), [bad.row for bad in table.bad_rows]) == (0, [1]), wrong


@KINDS
def test_a_table_that_is_missing(tmp_path, kind):
    if kind == ".parquet":
        pytest.importorskip("pyarrow")
    with pytest.raises(FileProblem, match="does not exist") as raised:
        read_table(tmp_path / f"none{kind}")
    assert raised.value.hint == "osora data scan FOLDER makes one"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "latin-1"])
def test_other_text_than_utf_8(tmp_path, encoding):
    path = tmp_path / "table.csv"
    path.write_bytes("path,text,num_frames,height,width\na.mp4,un été,5,64,64\n".encode(encoding))
    with pytest.raises(FileProblem, match="is not text in UTF-8") as raised:
        read_table(path)
    assert raised.value.hint == "save it as CSV (UTF-8)"


def test_the_fingerprint_is_of_what_orders_training(tmp_path):
    base = ["a.mp4", "text", 5, 64, 64, 24]
    prints = []
    for changed in (base, base, [*base[:1], "other text", *base[2:]], ["b.mp4", *base[1:]], [*base[:5], 25]):
        prints.append(read_table(write_rows(tmp_path / "table.csv", [changed])).fingerprint())
    assert prints[0] == prints[1] == prints[2]
    assert len({*prints}) == 3


@KINDS
def test_parts_have_all_rows_in_order_and_all_columns(tmp_path, kind):
    if kind == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"table{kind}"
    write_table(path, ["path", "other"], [(f"{i}.mp4", f"line\nof {i}") for i in range(10)])
    targets = [tmp_path / f"part_{i}{kind}" for i in range(3)]
    assert split_table(path, targets) == [3, 3, 4]
    columns = [read_columns(target, ["path", "other"]) for target in targets]
    assert [cell for part in columns for cell in part["path"]] == [f"{i}.mp4" for i in range(10)]
    assert [cell for part in columns for cell in part["other"]] == [f"line\nof {i}" for i in range(10)]


@pytest.mark.parametrize("name", ["path", "text"])
def test_parquet_cells_that_are_not_text(tmp_path, name):
    pyarrow = pytest.importorskip("pyarrow")
    write = pytest.importorskip("pyarrow.parquet").write_table
    cells = {
        "bytes": (pyarrow.array([b"a red b\xc3\xb6at"], pyarrow.binary()), "a red böat"),
        "latin bytes": (pyarrow.array([b"a red b\xf6at"], pyarrow.binary()), None),
        "list": (pyarrow.array([["a boat", "a ship"]]), None),
        "struct": (pyarrow.array([{"short": "a boat"}]), None),
        "nan": (pyarrow.array([math.nan]), ""),
        "number": (pyarrow.array([42]), "42"),
    }
    for kind, (array, text) in cells.items():
        path = tmp_path / f"{kind}.parquet"
        row = {"path": ["a.mp4"], "text": ["x"], "num_frames": [9], "height": [32], "width": [32]}
        write(pyarrow.table({**row, name: array}), path)
        table = read_table(path)
        if text is None:
            assert len(table) == 0, kind
            assert f"{name} holds" in table.bad_rows[0].reason
            assert "not a text in UTF-8" in table.bad_rows[0].reason
        elif name == "path" and not text:
            assert table.bad_rows[0].reason == "path is empty"
        else:
            assert (table.texts if name == "text" else table.paths)[0] == text, kind
