"""The chat program: piped, in its own process, and on a real terminal with Ctrl-C."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mimo_vk.chat import Chat, Screen
from mimo_vk.settings import Settings
from mimo_vk.stream import Content, Reasoning, ToolCall
from mimo_vk.talk import Local
from tests.fake_engine import FAIL, FakeEngine
from tests.picture_files import png
from tests.terminal import CTRL_C, CTRL_D, Terminal

ROOT = Path(__file__).resolve().parent.parent
FAKE = [sys.executable, "-m", "tests.fake_engine"]


def piped(text: bytes, *answers: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*FAKE, "0", *answers, "--", *flags], input=text, capture_output=True, cwd=ROOT, timeout=60)


def test_each_piped_line_is_answered_and_nothing_else_is_written() -> None:
    done = piped(b"Hi\n\n  \nUnd jetzt?\n", "Hello <b>&</b>\n", "Schön 🙂")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == "Hello <b>&</b>\nSchön 🙂\n"


def test_commands_work_when_piped() -> None:
    done = piped(b"/think\nHi\n/nothing here\n/stats\n/reset\n/help\n/quit\nnot read\n", "<think>hm</think>Ho", "never")
    lines = done.stdout.decode().splitlines()
    assert lines[:4] == ["thinking is on", "hm", "Ho", "unknown command /nothing; /help lists them"]
    assert lines[4].startswith("context: ") and "of 400 tokens" in lines[4]
    assert lines[5].startswith("prompt: 7 tokens")
    assert "forgotten" in lines and any(line.startswith("/quit") for line in lines)
    assert "never" not in lines and done.returncode == 0
    assert b"\x1b" not in done.stdout + done.stderr


def test_a_path_is_no_command() -> None:
    assert piped(b"/etc/passwd?\n", "A file.").stdout == b"A file.\n"


def test_bytes_that_are_no_text_do_not_end_it() -> None:
    done = piped(b"a\xff\xfeb\nlast line without an end", "ok", "yes")
    assert (done.returncode, done.stdout) == (0, b"ok\nyes\n")


def test_a_failed_line_is_reported_and_the_rest_is_answered() -> None:
    done = piped(b"1\n2\n", FAIL, "two")
    assert done.stdout == b"two\n"
    assert done.stderr == b"mimo-vk: shard.safetensors: byte 12: input/output error\n"
    assert done.returncode == 1


def test_a_full_context_is_one_line() -> None:
    done = piped(b"1\n2\n/reset\n3\n", "word " * 400, "fresh")
    assert done.stdout.decode().splitlines()[1:] == ["forgotten", "fresh"]
    assert done.stderr.count(b"\n") == 1
    assert done.stderr.endswith(b", and the context holds 400: --ctx 1024 would make room; /reset starts afresh\n")
    assert done.returncode == 2


def test_a_first_line_that_is_too_long_has_nothing_to_reset() -> None:
    done = piped(b"word " * 400 + b"\n", "never")
    assert (done.returncode, done.stdout) == (2, b"")
    assert re.search(rb", and the context holds 400: --ctx \d+ would make room\n$", done.stderr)


def test_a_bad_flag_is_one_line() -> None:
    done = piped(b"Hi\n", "never", flags=("--temperature", "hot"))
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)


def test_no_input_at_all() -> None:
    assert piped(b"").stdout == b""
    closed = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *FAKE, "0", "x"], capture_output=True, cwd=ROOT, timeout=60)
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, b"", b"")


def test_no_output_at_all() -> None:
    command = ["sh", "-c", '"$@" >&-', "sh", *FAKE, "0", "x"]
    closed = subprocess.run(command, input=b"Hi\n", capture_output=True, cwd=ROOT, timeout=60)
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, b"", b"")


def test_a_closed_output_ends_it_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [*FAKE, "0", "one", "two"]
    try:
        done = subprocess.run(command, input=b"a\nb\n", stdout=write_end, stderr=subprocess.PIPE, cwd=ROOT, timeout=60)
    finally:
        os.close(write_end)
    assert done.stderr == b""


def test_sampling_comes_from_the_settings_then_from_the_checkpoint() -> None:
    def sampler(settings: Settings) -> tuple[float, float]:
        engine = FakeEngine([])
        engine.generation = type(engine.generation)(temperature=0.7, top_p=0.8, eos_token_ids=None)
        chosen = Local(engine, settings).conversation._sampler
        return chosen.temperature, chosen.top_p

    assert sampler(Settings()) == (0.7, 0.8)
    assert sampler(Settings(temperature=0.0, top_p=0.5)) == (0.0, 0.5)


class FakeTty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_thinking_dimmed_and_no_control_characters() -> None:
    out = FakeTty()
    screen = Screen(out)
    for event in (Reasoning("hm"), Reasoning(" so"), Content("A\x1b[31m\tB\n"), ToolCall(0, "f", {"a": "ü"})):
        screen.event(event)
    screen.end_line()
    assert out.getvalue() == '\x1b[2mhm so\x1b[0m\nA\ufffd[31m\tB\n{"name": "f", "arguments": {"a": "ü"}}\n'


@pytest.mark.parametrize("leave", ["/quit\r", CTRL_D, CTRL_C])
def test_leaving_a_terminal(leave: str) -> None:
    with Terminal([*FAKE, "0", "Hello there.", "Hello again."], ROOT) as terminal:
        assert "Ctrl-C stops an answer" in terminal.wait_for("> ")
        terminal.type("Hi\r")
        terminal.wait_for("Hello there.")
        terminal.wait_for("> ")
        terminal.type("\x1b[A\r")  # the last line again, from the history
        terminal.wait_for("Hello again.")
        terminal.wait_for("> ")
        if leave == CTRL_C:
            terminal.interrupt()
            terminal.wait_for("Ctrl-C again")
            terminal.wait_for("> ")
            terminal.interrupt()
        else:
            terminal.type(leave)
        assert terminal.status() == 0
        assert "Traceback" not in terminal.seen


def test_ctrl_c_stops_the_answer_and_keeps_the_chat() -> None:
    with Terminal([*FAKE, "0.03", "long " * 300, "Still here.", "<think>deep</think>Yes"], ROOT) as terminal:
        terminal.wait_for("> ")
        terminal.type("Talk\r")
        terminal.wait_for("long long")
        terminal.type(CTRL_C)
        assert len(terminal.wait_for("stopped")) < 1000
        terminal.wait_for("> ")
        terminal.type("And?\r")
        terminal.wait_for("Still here.")
        terminal.wait_for("> ")
        terminal.type("/think\r")
        terminal.wait_for("thinking is on")
        terminal.wait_for("> ")
        terminal.type("Really?\r")
        terminal.wait_for("\x1b[2mdeep")
        terminal.wait_for("Yes")
        terminal.wait_for("> ")
        terminal.type("/reset\r")
        terminal.wait_for("forgotten")
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_one_ctrl_c_at_the_prompt_is_forgotten_by_the_next_line() -> None:
    with Terminal([*FAKE, "0", "One.", "Two."], ROOT) as terminal:
        for turn, answer in (("a", "One."), ("b", "Two.")):
            terminal.wait_for("> ")
            terminal.interrupt("half a line")
            terminal.wait_for("Ctrl-C again")
            terminal.wait_for("> ")
            terminal.type(f"{turn}\r")
            terminal.wait_for(answer)
        terminal.wait_for("> ")
        terminal.type(CTRL_D)
        assert terminal.status() == 0


def test_a_line_that_begins_with_a_path_sends_the_picture(tmp_path: Path) -> None:
    (tmp_path / "my photo.png").write_bytes(png("red"))
    (tmp_path / "second.png").write_bytes(png("blue", 96, 64))
    engine, out = FakeEngine(["Red.", "Both.", "No."]), io.StringIO()
    chat = Chat(Local(engine, Settings()), Screen(out))
    assert chat.line(f"'{tmp_path}/my photo.png'  what colour is it?", terminal=False)
    chat.line(f"{tmp_path}/second.png", terminal=False)
    chat.line("photo.png is only a name", terminal=False)
    assert out.getvalue() == "Red.\nBoth.\nNo.\n"
    (session,) = engine.sessions
    sizes = [[picture.tokens for picture in pictures.items] for pictures in session.pictures]
    assert sizes == [[4], [4, 6], [4, 6]]
    said = [engine.tokenizer.decode(ids, keep_special=True).rpartition("user\n")[2] for ids in session.prompts]
    pad = "<|image_pad|>"
    assert said[0].startswith(f"<|vision_start|>{pad * 4}<|vision_end|>what colour is it?<|im_end|>")
    assert said[1].startswith(f"<|vision_start|>{pad * 6}<|vision_end|><|im_end|>")
    assert said[2].startswith("photo.png is only a name<|im_end|>")


def test_a_closed_question_on_a_picture(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png("red"))
    engine, out = FakeEngine([]), io.StringIO()
    chat = Chat(Local(engine, Settings()), Screen(out))
    chat.line("/decide yes | no", terminal=False)
    chat.line(f"{tmp_path}/a.png Is it red?", terminal=False)
    assert "yes\t0.666667\nno\t0.333333\n" in out.getvalue()
    assert [picture.tokens for picture in engine.sessions[0].pictures[0].items] == [4]
    assert engine.sessions[0].pinned == []


def test_a_picture_that_can_not_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic" + bytes(40))
    lines = f"{tmp_path}/gone.png what?\n{tmp_path}/phone.heic what?\nHi\n"
    done = piped(lines.encode(), "Hello")
    gone, heic = done.stderr.decode().splitlines()
    assert gone == f"mimo-vk: {tmp_path}/gone.png: no such file"
    found = f"mimo-vk: {tmp_path}/phone.heic: expected a picture (PNG, JPEG, WebP, GIF, BMP, TIFF), found a HEIC file"
    assert heic.startswith(found)
    assert (done.stdout, done.returncode) == (b"Hello\n", 2)
