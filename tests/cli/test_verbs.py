"""The verbs that start nothing: version, help, list, explain, and what failures look like."""

from __future__ import annotations

import errno
import functools
import io
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import SafetensorError

import rlinf
from rlinf import __main__ as program
from rlinf.cli import main as main_module
from rlinf.cli.failure import report, reporting
from rlinf.cli.main import main
from rlinf.cli.train import INTERRUPTED
from rlinf.errors import MissingPackageError, RunFailure, sought


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run the command line in this process; returns exit code, output and error output."""
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"rlinf {rlinf.__version__}\n", "")
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for verb in ("train", "resume", "eval", "list", "explain", "check", "doctor", "plan", "view"):
        assert verb in out
        assert run(capsys, verb, "--help")[0] == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("recipes", ["quickstart"]),
        ("envs", ["metaworld", "gymnasium"]),
        ("models", ["mlp", "cnn"]),
        ("algorithms", ["ppo", "grpo"]),
        ("engines", ["hf", "vllm", "sglang"]),
        ("loggers", ["tensorboard", "wandb", "swanlab", "mlflow", "jsonl"]),
    ],
)
def test_list(capsys: pytest.CaptureFixture[str], kind: str, expected: Sequence[str]) -> None:
    code, out, _ = run(capsys, "list", kind)
    assert code == 0
    names = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert set(expected) <= set(names)


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "explain", "algorithm.gae_lambda")
    assert code == 0
    assert "algorithm.gae_lambda  (ppo)" in out
    assert "0.95 for actions, 1.0 for tokens" in out
    assert "default" in out
    code, out, _ = run(capsys, "explain", "rollout")
    assert code == 0
    assert "pipeline_stage_num" in out
    code, _, err = run(capsys, "explain", "trainer.test_freq")
    assert code == 2
    assert "that is `evaluation.interval` (embodied, off_policy, beh" in " ".join(err.split())
    code, _, err = run(capsys, "explain", "custom_reward_function.path")
    assert code == 2
    assert "here that is `reward.functions`" in err


@pytest.mark.parametrize("kind", [RunFailure, ValueError])
def test_a_message_of_any_length_is_shown_in_a_line_and_logged_whole(
    kind: type[Exception],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporting, "debug", False)
    monkeypatch.setattr(reporting, "log", tmp_path / "run.log")
    whole = f"begin {'0, ' * 5000}end"
    assert report(kind(whole)) == 1
    err = capsys.readouterr().err
    assert len(err) < 1200
    assert "begin 0, 0" in err
    assert "0, end" in err
    assert whole in (tmp_path / "run.log").read_text(encoding="utf-8")


def test_a_failure_shows_its_end_and_logs_the_whole(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deep(level: int) -> None:
        if level == 0:
            raise RunFailure("the first failure")
        deep(level - 1)

    def fail(args: object) -> None:
        reporting.log = tmp_path / "run.log"
        deep(5)

    monkeypatch.setattr(main_module, "_command", lambda: fail)
    code, _, err = run(capsys, "anything")
    assert code == 1
    assert "the run failed: the first failure" in err
    assert "Traceback" not in err
    assert f"whole trace in {tmp_path / 'run.log'}" in err
    log = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert log.count("deep(level - 1)") >= 2
    assert "Traceback" in log
    reporting.debug = True
    assert report(RunFailure("again")) == 1
    assert "RunFailure: again" in capsys.readouterr().err


def test_a_full_disk_is_no_trace_and_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "debug", False)
    monkeypatch.setattr(reporting, "log", Path("/dev/full"))  # there is no room for the trace
    full = OSError(errno.ENOSPC, "No space left on device", "policy.safetensors")
    assert report(full) == 1
    shown = capsys.readouterr().err
    assert "No space left on device: policy.safetensors" in shown
    assert "go on with: rlinf resume /dev\n" in shown
    assert "Traceback" not in shown
    assert report(SafetensorError("Error while serializing: I/O error: … (os error 28)")) == 1
    shown = capsys.readouterr().err
    assert "go on with: rlinf resume /dev\n" in shown
    assert "trace" not in shown.lower()
    refused = RunFailure("The checkpoint of step 4 was not written")
    refused.__cause__ = full
    assert report(refused) == 1
    shown = capsys.readouterr().err
    assert "The checkpoint of step 4 was not written\n" in shown
    assert "go on with: rlinf resume /dev\n" in shown
    for given in ("resumes", False), ("log", None):  # as of an evaluation, and before a run began
        monkeypatch.setattr(reporting, *given)
        assert report(full) == 1
        shown = capsys.readouterr().err
        assert "free some space, and give the command again" in shown
        assert "resume" not in shown


def test_a_file_that_can_no_longer_be_written_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reporting, "debug", False)
    monkeypatch.setattr(reporting, "log", tmp_path / "run.log")
    assert report(OSError(errno.EROFS, "Read-only file system", "metrics.jsonl")) == 1
    told, where = capsys.readouterr().err.splitlines()
    assert told == "failure: the run failed: Read-only file system: metrics.jsonl"
    assert where == f"whole trace in {tmp_path / 'run.log'}"


def test_of_a_long_message_the_screen_shows_the_beginning_and_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "debug", False)
    monkeypatch.setattr(reporting, "log", None)
    told = ["a process failed", *(f"line {number}" for number in range(60)), "ImportError: such"]
    assert report(RunFailure("\n".join(told))) == 1
    shown = capsys.readouterr().err.splitlines()
    assert "a process failed" in shown[0]
    assert shown[-2] == "ImportError: such"
    assert "…" in shown
    assert 15 < len(shown) < 25


def test_an_exception_that_nobody_foresaw_shows_the_end_of_its_trace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_module, "_command", lambda: functools.partial(json.loads, [1]))
    code, _, err = run(capsys, "anything")
    assert code == 1
    assert "the run failed; the trace ends in" in err
    assert "TypeError: the JSON object must be str" in err
    assert "whole trace with --debug" in err


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
     RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")],
)  # fmt: skip
def test_full_memory_is_told_with_what_needs_less(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "debug", False)
    monkeypatch.setattr(reporting, "log", None)
    assert report(error) == 1
    first, less, _ = capsys.readouterr().err.splitlines()
    assert first.startswith(f"failure: memory is full: {type(error).__name__}")
    assert "`rlinf plan RECIPE --memory`" in less
    assert "replay.capacity" in less


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        RunFailure("an env process was lost\nself.pid = _fork_exec(\nBlockingIOError: [Errno 11]"),
        None,
    ],
)
def test_where_nothing_more_can_be_started_it_is_said_in_a_line(
    error: Exception | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "debug", False)
    monkeypatch.setattr(reporting, "log", None)
    if error is None:

        def fork() -> None:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        try:
            fork()
        except BlockingIOError as caught:
            error = caught
    assert report(error) == 1
    first, where = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"failure: no further thread or process .*`ulimit -u`: .*", first)
    assert where == "whole trace with --debug"


def test_a_log_that_takes_no_trace_is_not_named_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "debug", False)
    monkeypatch.setattr(reporting, "log", tmp_path / "run.log")
    assert report(RuntimeError("broken")) == 1
    assert f"whole trace in {tmp_path / 'run.log'}" in capsys.readouterr().err
    monkeypatch.setattr(reporting, "log", tmp_path)  # no user can open a directory as a file
    assert report(RuntimeError("broken")) == 1
    assert "whole trace with --debug" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train"], ["resume"], ["data", "show"], ["check", "model"]])
def test_a_name_that_no_file_can_have_is_the_users_to_mend(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *words, "x" * 300)
    assert code == 2
    assert "File name too long" in err
    assert len(err) < 300


def test_nothing_is_written_over_what_is_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Written as the superuser, a file would take the place of a device such as /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for words in (["plan", "quickstart", "--save"], ["data", "stats", ".", "--out"]):
        code, _, err = run(capsys, *words, str(pipe))
        assert code == 2
        assert f"'{pipe}' is a device, pipe or socket; give a file, such as " in err
    assert pipe.is_fifo()


@pytest.mark.parametrize("inside", [json.__file__, "pyarrow/table.pxi"])
def test_an_exception_of_the_users_own_code_is_told_in_a_line_with_its_place(
    inside: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compile("import json\njson.loads([1])", inside, "exec")

    def fail(args: object) -> None:
        exec(library)  # what libraries raise is of this line, also those that Cython compiled

    monkeypatch.setattr(main_module, "_command", lambda: fail)
    code, _, err = run(capsys, "anything")
    told, where = err.splitlines()
    assert code == 1
    assert told.startswith("failure: the run failed: TypeError: the JSON object must be str")
    assert told.endswith(f"({__file__} line {fail.__code__.co_firstlineno + 1})")
    assert where == "whole trace with --debug"


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), INTERRUPTED), (MissingPackageError("a", "b", "c"), 2), (OSError(), 1)],
)
def test_exit_codes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    def fail(args: object) -> None:
        raise error

    monkeypatch.setattr(main_module, "_command", lambda: fail)
    assert main([]) == code


def test_a_terminal_that_lacks_a_character_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["list", "recipes"]) == 0
    sys.stdout.flush()
    assert b"\\u03c0" in written.getvalue()


def test_several_env_types_are_checked_and_summed_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLINF_ENVS", str(tmp_path))
    assert main(["check", "env", "gymnasium", "libero", "max_episode_steps=9"]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^gymnasium +13 of 13 +\d+ *$", shown, re.MULTILINE), shown
    assert re.search(r"^libero +not run +.*rlinf env install libero", shown, re.MULTILINE), shown
    assert shown.splitlines()[-1] == "1 of 2 env types passed"


def test_an_unknown_env_type_among_several_is_refused_first(capsys):
    assert main(["check", "env", "gymnasium", "metawrld"]) == 2
    assert "did you mean `metaworld`?" in capsys.readouterr().err
    assert main(["check", "env"]) == 2
    assert "--installed" in capsys.readouterr().err


def test_an_interrupt_while_libraries_are_imported_ends_without_a_trace(monkeypatch):
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "rlinf.cli.main", Interrupted("rlinf.cli.main"))
    before = signal.getsignal(signal.SIGINT)
    try:
        assert program.main() == 130
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("words", [["mlp"], ["categorical_mlp", "--choices", "3"]])
def test_a_policy_is_checked_for_the_kind_of_actions_that_it_gives(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "model", *words, "--image-size", "8"]) == 0
    assert "9 of 9 checks passed" in capsys.readouterr().out


def test_a_policy_is_checked_in_the_environment_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {
        "observation_shapes": {"images.top": [16, 16, 3], "states": [4], "instruction": [256]},
        "observation_dtypes": {"images.top": "uint8", "states": "float32", "instruction": "uint8"},
        "action_kind": "continuous",
        "action_dim": 3,
        "action_low": [-2.0, -1.0, 0.0],
        "action_high": [2.0, 1.0, 5.0],
        "task_descriptions": [],
        "max_episode_steps": 8,
    }
    (tmp_path / "env_spec.json").write_text(json.dumps(spec))
    words = ["check", "model", "smolvla", "cameras=[images.top]", "max_prompt_tokens=64"]
    assert main([*words, "--run", str(tmp_path)]) == 0
    assert re.search(r"(\d+) of \1 checks passed", capsys.readouterr().out)
    assert main([*words, "--run", str(tmp_path / "gone")]) == 2
    assert "has no env_spec.json; give the directory of a run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["./gone", "/gone/pi0"])
def test_a_model_in_a_directory_that_is_gone_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "check", "model", name)
    assert code == 2
    assert f"there is no directory {sought(Path(name))}; nearest: " in err


@pytest.mark.parametrize("option", ["--state-dim", "--action-dim", "--image-size"])
def test_shapes_that_no_environment_has_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in ("-1", "100000000000"):
        code, _, err = run(capsys, "check", "model", "mlp", option, value)
        assert code == 2
        assert f"'{option}'" in err
