"""Prompts that are rewritten before anything is made: questions, answers and errors."""

import json
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest
import torch
from chat_server import KEY, ChatStub, said, serving, with_status
from PIL import Image
from tiny_world import RecordingReporter

from opensora_cli.core.exceptions import FileProblem, HardwareError, RequestError
from opensora_cli.engine.generate import refinement
from opensora_cli.engine.generate.refinement import ChatServer, _jpeg_of, refined
from opensora_cli.media.write import write_media
from opensora_cli.settings.generate import GenerateSettings
from opensora_cli.settings.load import load_preset


@pytest.fixture
def start(monkeypatch, tmp_path) -> Iterator:
    monkeypatch.setattr(refinement, "sleep", lambda _: None)
    monkeypatch.setattr(refinement, "_TIMEOUT_S", 1.0)
    with serving(monkeypatch, tmp_path / "cache") as start:
        yield start


def settings_of(**changes: object) -> GenerateSettings:
    given = {"refine.prompt": True, **{key.replace("__", "."): value for key, value in changes.items()}}
    return load_preset("256px", prompt="a boat").replace(given)


def run(settings: GenerateSettings) -> tuple[GenerateSettings, RecordingReporter]:
    reporter = RecordingReporter()
    return refined(settings, reporter=reporter), reporter


def picture(path: Path, *, width: int = 40, height: int = 20) -> str:
    Image.new("RGB", (width, height)).save(path)
    return str(path)


def system_of(stub: ChatStub, number: int = 0) -> str:
    return stub.asked[number]["messages"][0]["content"]


class TestRefined:
    def test_the_answer_takes_the_place_of_the_prompt_which_is_kept(self, start):
        stub = start("A red boat crosses a calm lake.")
        settings, reporter = run(settings_of())
        assert settings.prompt == "A red boat crosses a calm lake."
        assert settings.refine == settings_of(refine__prompt=False, refine__original="a boat").refine
        assert reporter.notes == ["refined prompt: A red boat crosses a calm lake."]
        assert reporter.warnings == []
        # It is done: nothing is asked again.
        assert refined(settings, reporter=RecordingReporter()) is settings
        assert len(stub.asked) == 1

    @pytest.mark.parametrize(
        ("answer", "prompt"),
        [
            ('  "A boat,\n\n sailing."\n', "A boat, sailing."),
            ("“A boat.”", "A boat."),
            ('"Stop" says a sign, "go" another', '"Stop" says a sign, "go" another'),
            ("<think>\nA boat?\n</think>\nA boat.", "A boat."),
            ("A boat?</think>A boat.", "A boat."),
            ("A b\x1b[31moat\x00.", "A b[31moat."),
            ("A \u202eb\u2066oat\u2069 \u200b\ufeff.\u2028Snow\x9b 👩\u200d🚀", "A boat . Snow 👩\u200d🚀"),
            ("Ein Böötchen 🚤 на воде", "Ein Böötchen 🚤 на воде"),
        ],
    )
    def test_answers_are_cleaned(self, start, answer, prompt):
        start(answer)
        assert run(settings_of())[0].prompt == prompt

    @pytest.mark.parametrize("answers", [[500] * 3, [401], ["x" * 10_001] * 3, ["<think>What"] * 3])
    def test_without_an_answer_the_run_ends(self, start, answers):
        stub = start(*answers)
        for _ in range(2):  # Nothing is kept: the next run asks again.
            with pytest.raises(HardwareError) as raised:
                run(settings_of())
            assert raised.value.message.startswith(f"{stub.url} ")
        assert len(stub.asked) > len(answers)

    def test_kinds(self, start, tmp_path):
        stub = start("One.", "Two.", "Three.")
        run(settings_of())
        run(settings_of(video__num_frames=1))
        files = (picture(tmp_path / "a.png"), picture(tmp_path / "b.png", width=3000, height=1500))
        run(settings_of(condition__references=files))
        asked = [system_of(stub, number) for number in range(3)]
        assert len({*asked}) == 3
        assert all(each.startswith("You write prompts") for each in asked)
        _, *shown = stub.asked[2]["messages"][1]["content"]
        assert len(shown) == 2

    def test_pictures_are_made_small_and_of_videos_the_first_frame_is_shown(self, tmp_path):
        large = picture(tmp_path / "large.png", width=3000, height=1500)
        assert Image.open(BytesIO(_jpeg_of(large))).size == (1024, 512)
        frames = torch.zeros(3, 16, 32, 3, dtype=torch.uint8)
        frames[1:] = 255
        write_media([frames], tmp_path / "a.gif", format="gif", fps=10)
        with Image.open(BytesIO(_jpeg_of(tmp_path / "a.gif"))) as shown:
            assert (shown.size, shown.getpixel((5, 5))) == ((32, 16), (0, 0, 0))
        with pytest.raises(FileProblem, match=r"none\.png does not exist"):
            _jpeg_of(tmp_path / "none.png")

    def test_a_prompt_is_rewritten_from_the_original_again(self, start):
        stub = start("A ship.")
        settings, _ = run(settings_of(prompt="A red boat.", refine__original="a boat"))
        assert stub.asked[0]["messages"][1]["content"] == "a boat"
        assert (settings.prompt, settings.refine.original) == ("A ship.", "a boat")


class TestMotionScore:
    @pytest.mark.parametrize(("answer", "score"), [("7", 7), ("Score: 15.", 15), ("<think>3 or 4</think> 4", 4)])
    def test_it_becomes_the_suffix(self, start, answer, score):
        stub = start(answer)
        settings, reporter = run(settings_of(refine__prompt=False, refine__motion_score=True))
        assert (settings.prompt_suffix.motion_score, settings.prompt) == (score, "a boat")
        assert (settings.refine.is_on, settings.refine.original) == (False, None)
        assert reporter.notes == [f"motion score: {score}"]
        assert "from 1 to 15" in system_of(stub)

    @pytest.mark.parametrize("answer", ["0", "16", "1 to 5", "9" * 5000])
    def test_an_answer_that_is_no_score_is_an_error(self, start, answer):
        start(answer, answer, answer)
        with pytest.raises(HardwareError, match="is no number from 1 to 15"):
            run(settings_of(refine__prompt=False, refine__motion_score=True))

    def test_it_is_chosen_for_the_rewritten_prompt(self, start):
        stub = start("A fast boat.", "12")
        settings, _ = run(settings_of(refine__motion_score=True))
        assert [each["messages"][1]["content"] for each in stub.asked] == ["a boat", "A fast boat."]
        assert (settings.prompt, settings.prompt_suffix.motion_score) == ("A fast boat.", 12)


class TestCache:
    def test_the_same_is_asked_once(self, start, tmp_path):
        stub = start("One.", "Two.", "Three.", "Four.")
        assert run(settings_of())[0].prompt == run(settings_of())[0].prompt == "One."
        assert run(settings_of(prompt="a ship"))[0].prompt == "Two."
        assert run(settings_of(video__num_frames=1))[0].prompt == "Three."
        file = picture(tmp_path / "a.png")
        assert run(settings_of(condition__references=(file,)))[0].prompt == "Four."
        # By its content.
        other = picture(tmp_path / "b.png")
        assert run(settings_of(condition__references=(other,)))[0].prompt == "Four."
        assert len(stub.asked) == 4
        for model in ("large", None):
            start("Seven.", model=model)
            assert run(settings_of())[0].prompt == "Seven."

    @pytest.mark.parametrize("content", [b"{", b'{"schema": "osora.refined/1", "answer": 7}', b'{"answer": "A boat."}'])
    def test_torn_files_are_asked_again_and_replaced(self, start, tmp_path, content):
        start("One.", "Two.")
        run(settings_of())
        [file] = (tmp_path / "cache" / "osora" / "refined").iterdir()
        file.write_bytes(content)
        assert run(settings_of())[0].prompt == "Two."
        assert json.loads(file.read_text())["answer"] == "Two."

    def test_a_cache_that_cannot_be_written_costs_a_warning(self, start, tmp_path):
        (tmp_path / "cache").write_text("no folder")
        start("One.")
        settings, reporter = run(settings_of())
        assert settings.prompt == "One."
        assert reporter.warnings[0].startswith("the answer is not kept for the next time: ")


def ask(*, read=str, tries=3, reporter=None) -> str:
    """Ask the server that the environment names."""
    server = ChatServer(reporter or RecordingReporter(), tries=tries)
    return server.ask("be brief", "a boat", pictures=(), read=read)


def problem(**options) -> str:
    with pytest.raises(HardwareError) as raised:
        ask(**options)
    assert raised.value.exit_code == 4
    assert KEY not in f"{raised.value.message} {raised.value.hint}"
    return raised.value.message


class TestServer:
    @pytest.mark.parametrize(
        "url", ["", "localhost:8000", "ftp://a", "http://[", "http://me:secret@a", "http://a?secret"]
    )
    def test_a_wrong_address_is_refused(self, monkeypatch, url):
        monkeypatch.setenv("OSORA_REFINE_URL", url)
        with pytest.raises(RequestError, match="OSORA_REFINE_URL") as raised:
            ask()
        assert "export OSORA_REFINE_URL=http" in raised.value.hint
        assert "secret" not in str(raised.value)

    def test_without_a_key_none_is_sent_and_the_first_model_is_asked(self, start, monkeypatch):
        stub = start("A boat.", model=None)
        monkeypatch.delenv("OSORA_REFINE_KEY")
        assert ask() == "A boat."
        assert stub.paths == ["/v1/models", "/v1/chat/completions"]
        assert (stub.keys, stub.asked[0]["model"]) == ([None, None], "listed-model")

    def test_busy_servers_are_asked_again_later_and_later(self, start, monkeypatch):
        waits, beats, reporter = [], [], RecordingReporter()
        monkeypatch.setattr(refinement, "sleep", waits.append)
        monkeypatch.setattr(refinement, "beat", lambda *beat: beats.append(beat))
        start(503, 500, 429, "A boat.")
        assert ask(tries=4, reporter=reporter) == "A boat."
        assert waits == [1, 2, 4]
        assert beats == [("refine", 31.0)] * 4
        assert "503 Service Unavailable; try 2 of 4 in 1 s" in reporter.notes[0]

    @pytest.mark.parametrize("status", [302, 308, 400, 401])
    def test_refusals_are_final_and_redirections_are_not_followed(self, start, status):
        elsewhere = start("here I am")
        stub = start(with_status(status, f"no model\nfor {KEY}".encode(), Location=f"{elsewhere.url}/chat/completions"))
        assert f" refuses: {status} " in (message := problem())
        assert message.endswith("no model for <hidden>")
        assert (elsewhere.paths, len(stub.asked)) == ([], 1)

    def test_a_refusal_whose_text_does_not_come_is_still_a_refusal(self, start):
        def answer(handler):
            handler.send_response(400)
            handler.send_header("Content-Length", "100")
            handler.end_headers()
            time.sleep(30)

        start(answer)
        assert problem().endswith(" refuses: 400 Bad Request")

    @pytest.mark.parametrize(
        ("answer", "words"),
        [
            (b"<html>", "no JSON"),
            (b'{"choices": []}', "an answer of another form"),
            (said(None), "an answer without text"),
            (b" " * 10_000_001, "JSON with more values"),
            (lambda handler: handler.connection.close(), ""),
            (lambda handler: time.sleep(30), "timed out"),
        ],
        ids=["text", "empty", "none", "endless", "closed", "late"],
    )
    def test_nonsense_is_asked_again(self, start, answer, words):
        start(answer, "A boat.")
        assert ask() == "A boat."
        start(answer)
        assert words in problem(tries=1)

    def test_a_server_that_does_not_run_is_an_error(self, start):
        start().close()
        assert "Connection refused" in problem(tries=2)
