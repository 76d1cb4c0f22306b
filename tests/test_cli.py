"""The command line's edge (statuses, one line per problem, closed pipes), and ``run`` from end to end."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mimo_vk import __version__, cli
from mimo_vk.errors import CheckpointError, MimoError, ReadError, UsageError

COMMAND = [sys.executable, "-m", "mimo_vk"]
IDS = "1 2 3 4 5 6 7"


def mimo(*args: str | Path, root: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, "stdin": subprocess.DEVNULL} | more
    return subprocess.run([*COMMAND, *map(str, args)], cwd=root, **options)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., int]], None]:
    """Puts a function in the place of ``mimo-vk plan``."""

    def put(function: Callable[..., int]) -> None:
        monkeypatch.setitem(sys.modules, "mimo_vk.plan", SimpleNamespace(main=function))

    return put


def raising(error: BaseException) -> Callable[..., int]:
    def main(settings: object, args: object) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [
        (UsageError("--cap: too small"), 2, ["mimo-vk: --cap: too small"]),
        (CheckpointError(["a: short", "b: missing"]), 2, ["mimo-vk: a: short", "mimo-vk: b: missing"]),
        (ReadError("x at 12"), 1, ["mimo-vk: x at 12"]),
        (MimoError("no"), 1, ["mimo-vk: no"]),
        (KeyboardInterrupt(), 130, []),
        (BrokenPipeError(), 141, []),
        (
            ValueError("two\nlines"),
            1,
            ["mimo-vk: ValueError: two lines; run with --log-level debug for the traceback"],
        ),
        (MemoryError(), 1, ["mimo-vk: MemoryError: no message; run with --log-level debug for the traceback"]),
    ],
)
def test_errors_become_lines_and_a_status(
    error: BaseException, status: int, lines: list[str], command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command(raising(error))
    assert cli.main(["plan"]) == status
    out, err = capsys.readouterr()
    assert (out, err.splitlines()) == ("", lines)


def test_debug_shows_the_traceback(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(ValueError("inside")))
    assert cli.main(["plan", "--log-level", "debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last):" in err
    assert err.splitlines()[-1] == "mimo-vk: ValueError: inside"


def test_a_warning_reads_the_same_wherever_it_comes_from(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def main(settings: object, args: object) -> int:
        logging.getLogger("mimo_vk").warning("old %s", "file")
        return 0

    command(main)
    assert cli.main(["plan"]) == 0
    assert capsys.readouterr().err == "mimo-vk: warning: old file\n"


def test_a_command_gets_its_settings_and_gives_the_status(command: Any) -> None:
    seen: list[Any] = []

    def main(settings: object, args: object) -> int:
        seen.append((settings, args))
        return 7

    command(main)
    assert cli.main(["plan", "--ctx", "99", "--no-direct", "--think", "--dirs", "a:b"]) == 7
    settings, args = seen[0]
    assert (settings.ctx, settings.direct, settings.think, settings.dirs) == (99, False, True, (Path("a"), Path("b")))
    assert args.command == "plan"


def test_unknown_variables_are_warned_about(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MIMO_CHUNKS", "3")
    command(lambda settings, args: 0)
    assert cli.main(["plan"]) == 0
    assert (
        capsys.readouterr().err == "mimo-vk: warning: unknown variable MIMO_CHUNKS is ignored; MIMO_CHUNK was meant?\n"
    )


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "expected a command: chat, run, serve"),
        (["fly"], "'fly' is no command: expected chat, run, serve"),
        (["run"], "--prompt"),
        (["run", "--ids", "1", "--prompt", "x"], "--prompt and --ids: only one of them can be meant"),
        (["run", "--ids", "1 two"], "--ids"),
        (["run", "--ids", "-1"], "--ids"),
        (["run", "--ids", " "], "--ids"),
        (["run", "--ids", "1", "--ngen", "-1"], "--ngen"),
        (["run", "--ids", "1", "--ngen", "x"], "--ngen"),
        (["run", "--ids", "1", "--pro"], "unknown flag --pro; --prompt was meant? (see mimo-vk run --help)"),
        (["run", "--chta", "hello"], "unknown flag --chta; --chat was meant?"),
        (["run", "--nope=3"], "unknown flag --nope (see mimo-vk run --help)"),
        (["run", "hello"], "unexpected 'hello'"),
        (["run", "--chat"], "--chat: a value is missing"),
        (["chat", "--think=1"], "--think: takes no value"),
        (["--model", "x", "run"], "--model before the command"),
        (["run", "--ids", "1", "--dump-logits", "/nonexistent/x.npy"], "--dump-logits"),
        (["run", "--ids", "1", "--dump-logits", "/"], "--dump-logits"),
        (["plan", "--cap", "none"], "--cap"),
        (["plan", "--ram"], "--ram"),
        (["plan", "surplus"], "surplus"),
    ],
)
def test_a_bad_call_is_one_line_and_status_2(args: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert named in err and len(err.splitlines()) == 1


def test_help_and_version(project_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mimo-vk {__version__}\n"
    assert cli.main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--dump-logits" in text and "[MIMO_CTX]" in text and "70% of" in text
    for name in cli.COMMANDS:
        assert cli.main([name, "--help"]) == 0
        assert "--model" in capsys.readouterr().out


def python(code: str, *args: str | Path, root: Path) -> str:
    """The last line that a fresh interpreter prints."""
    command = [sys.executable, "-c", f"import sys; from mimo_vk.cli import main; {code}", *map(str, args)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()[-1]


def test_help_imports_nothing_heavy(project_root: Path) -> None:
    code = "main(['--help']); print(sorted({'numpy', 'numba', 'kp'} & set(sys.modules)))"
    assert python(code, root=project_root) == "[]"


def test_plan_does_not_load_numba(project_root: Path, tiny_checkpoint: Path) -> None:
    code = "print(main(['plan', '--model', sys.argv[1]]), 'numba' in sys.modules)"
    assert python(code, tiny_checkpoint, root=project_root) == "0 False"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_quiet(unbuffered: str, project_root: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    plain: dict[str, Any] = {"stdout": writing, "stderr": subprocess.PIPE, "capture_output": False, "env": environ}
    done = mimo("doctor", "--cpu", root=project_root, **plain)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


FULL = "mimo-vk: standard output: No space left on device"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(unbuffered: str, project_root: Path) -> None:
    environ = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        plain: dict[str, Any] = {"stdout": full, "stderr": subprocess.PIPE, "capture_output": False, "env": environ}
        done = mimo("doctor", "--cpu", root=project_root, **plain)
    assert (done.returncode, done.stderr.splitlines()) == (1, [FULL])


@pytest.mark.parametrize("args", [["run", "--ids", IDS, "--ngen", "4"], ["chat"]])
def test_an_answer_that_does_not_fit_the_disk_says_so(
    args: list[str], project_root: Path, tiny_checkpoint: Path
) -> None:
    environ = {**os.environ, "MIMO_BACKEND": "numpy"}
    with open("/dev/full", "w") as full:
        flags = [*COMMAND, *args, "--model", str(tiny_checkpoint), "--cpu", "--ctx", "64"]
        streams: dict[str, Any] = {"input": "/help\n", "stdout": full, "stderr": subprocess.PIPE}
        done = subprocess.run(flags, cwd=project_root, env=environ, text=True, timeout=60, **streams)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, FULL)


def test_without_standard_error_its_lines_go_nowhere(project_root: Path) -> None:
    """Python prints to standard output what is meant for a standard error that the caller closed."""
    closed = ["sh", "-c", 'exec "$@" 2>&-', "sh", *COMMAND, "run", "--nope"]
    done = subprocess.run(closed, cwd=project_root, stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")


def test_a_full_standard_error_fails_nothing(project_root: Path) -> None:
    args = ["run", "--cpu", "--ctx", "64", "--ids", IDS, "--ngen", "0"]  # without --model, which is warned about
    environ = {**os.environ, "MIMO_BACKEND": "numpy"}
    with open("/dev/full", "w") as full:
        plain: dict[str, Any] = {"capture_output": False, "stderr": full, "stdout": subprocess.PIPE, "env": environ}
        done = mimo(*args, root=project_root, **plain)
    assert done.returncode == 0


def run_tiny(root: Path, model: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    """``run`` on numpy, which compiles nothing; progress of a slow machine is left out of standard error."""
    environ = {**os.environ, "MIMO_BACKEND": "numpy"}
    done = mimo("run", "--model", model, "--cpu", "--ctx", "64", *args, root=root, env=environ)
    done.stderr = "".join(line for line in done.stderr.splitlines(keepends=True) if line.startswith("mimo-vk: "))
    return done


def test_run_streams_and_ends_with_json(project_root: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    dump = tmp_path / "out.npy"
    done = run_tiny(project_root, tiny_checkpoint, "--ids", IDS, "--ngen", "5", "--json", "--dump-logits", dump)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout.splitlines()[-1])
    logits = np.load(dump)
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    assert (logits.dtype, logits.shape) == (np.dtype(np.float32), (7, config["vocab_size"]))
    assert found["prompt_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert len(found["ids"]) == 5 or found["finish_reason"] == "stop"
    assert set(found) >= {"text", "reasoning", "tool_calls", "stats"}
    assert all(found["seconds"][part] > 0 for part in ("load", "prefill", "decode"))
    assert (found["stats"]["prefill_tokens"], found["stats"]["reused_tokens"]) == (7, 0)
    assert os.listdir(tmp_path) == ["out.npy"]
    again = run_tiny(project_root, tiny_checkpoint, "--ids", IDS.replace(" ", ","), "--ngen", "5", "--json")
    assert json.loads(again.stdout.splitlines()[-1])["ids"] == found["ids"]


def test_run_takes_the_likeliest_token(project_root: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    dump = tmp_path / "out.npy"
    first = run_tiny(project_root, tiny_checkpoint, "--ids", IDS, "--ngen", "3", "--json")
    ids = json.loads(first.stdout.splitlines()[-1])["ids"]
    longer = " ".join(map(str, [IDS, *ids]))
    assert (
        run_tiny(project_root, tiny_checkpoint, "--ids", longer, "--ngen", "0", "--dump-logits", dump).returncode == 0
    )
    size = 1 + max(
        token["id"] for token in json.loads((tiny_checkpoint / "tokenizer.json").read_text())["added_tokens"]
    )
    assert np.load(dump)[6:9, :size].argmax(axis=1).tolist() == ids


def test_ngen_0_only_reads(project_root: Path, tiny_checkpoint: Path) -> None:
    done = run_tiny(project_root, tiny_checkpoint, "--ids", IDS, "--ngen", "0", "--json")
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert (found["ids"], found["text"], found["seconds"]["decode"]) == ([], "", 0)


def test_without_a_tokenizer_ids_are_printed(project_root: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in tiny_checkpoint.iterdir():
        if path.name not in (
            "tokenizer.json",
            "chat_template.jinja",
            "tokenizer_config.json",
            "generation_config.json",
        ):
            (bare / path.name).symlink_to(path)
    done = run_tiny(project_root, bare, "--ids", IDS, "--ngen", "4", "--json")
    assert done.returncode == 0
    *answer, last = done.stdout.splitlines()
    found = json.loads(last)
    assert [int(word) for word in " ".join(answer).split()] == found["ids"]
    assert found["text"] == ""
    for flag in ("--prompt", "--chat"):
        refused = run_tiny(project_root, bare, flag, "hello")
        assert refused.returncode == 2
        assert refused.stderr.startswith(f"mimo-vk: {flag}: ") and "--ids" in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


def test_chat_puts_the_template_around(project_root: Path, tiny_checkpoint: Path) -> None:
    plain = run_tiny(project_root, tiny_checkpoint, "--prompt", "hello", "--ngen", "1", "--json")
    chat = run_tiny(project_root, tiny_checkpoint, "--chat", "hello", "--ngen", "1", "--json")
    inner, outer = (json.loads(done.stdout.splitlines()[-1])["prompt_ids"] for done in (plain, chat))
    assert 0 < len(inner) < len(outer)
    assert any(outer[at : at + len(inner)] == inner for at in range(len(outer)))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--ids", IDS, "--ngen", "58"], ": --ngen 57 or --ctx 1024 would make room"),
        (["--ids", "1 99999999"], "99999999"),
        (["--prompt", ""], "empty"),
    ],
)
def test_what_the_model_cannot_take_is_status_2(
    args: list[str], said: str, project_root: Path, tiny_checkpoint: Path
) -> None:
    done = run_tiny(project_root, tiny_checkpoint, *args, *([] if "--ngen" in args else ["--ngen", "4"]))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


def test_logits_that_do_not_fit_leave_nothing_behind(project_root: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    old = tmp_path / "out.npy"
    old.write_bytes(b"older")
    limit = "import resource, sys, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); import signal; "
    limit += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); runpy.run_module('mimo_vk', run_name='__main__')"
    args = ["run", "--model", tiny_checkpoint, "--cpu", "--ids", IDS, "--ngen", "0", "--dump-logits", old]
    done = subprocess.run(
        [sys.executable, "-c", limit, *map(str, args)],
        cwd=project_root,
        env={**os.environ, "MIMO_BACKEND": "numpy"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"mimo-vk: {old}: the logits could not be written")
    assert os.listdir(tmp_path) == ["out.npy"]
    assert old.read_bytes() == b"older"


def test_a_device_is_written_to_and_stays_a_device(project_root: Path, tiny_checkpoint: Path) -> None:
    done = run_tiny(project_root, tiny_checkpoint, "--ids", IDS, "--ngen", "0", "--dump-logits", "/dev/null")
    assert done.returncode == 0
    assert not Path("/dev/null").is_file()


DROPPED = """
import signal, sys, time, types, weakref
from mimo_vk import cli
class Thing: pass
def command(settings, args):
    thing = Thing()
    kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    time.sleep(60)
    return 0
sys.modules["mimo_vk.plan"] = types.SimpleNamespace(main=command)
sys.exit(cli.main(["plan"]))
"""


def test_an_interrupt_that_a_callback_drops_is_sent_again(project_root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DROPPED], cwd=project_root, capture_output=True, timeout=50)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("ending", ["interrupt", "closed pipe"])
def test_an_answer_can_be_stopped(ending: str, project_root: Path, tiny_checkpoint: Path) -> None:
    flags = ["--model", tiny_checkpoint, "--cpu", "--ids", IDS, "--ngen", "2000", "--temperature", "9", "--seed", "1"]
    process = subprocess.Popen(
        [*COMMAND, "run", *map(str, flags)],
        cwd=project_root,
        env={**os.environ, "MIMO_BACKEND": "numpy"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)  # the answer has begun
    if ending == "interrupt":
        process.send_signal(signal.SIGINT)
    else:
        process.stdout.close()
    said = [line for line in process.stderr.read().decode().splitlines() if line.startswith(("mimo-vk: ", "Traceback"))]
    assert (process.wait(60), said) == (130 if ending == "interrupt" else 141, [])
    process.stderr.close()
    process.stdout.close()
