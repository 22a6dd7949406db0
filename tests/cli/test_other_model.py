"""A checkpoint, or a file, of another model is refused before its weights are touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlinf.cli.main import main
from rlinf.monitor.run_origin import ORIGIN_FILE
from tests.runners.support import write_recipe


@pytest.fixture(scope="module")
def widened_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one training step whose config was edited to wider layers afterwards."""
    directory = tmp_path_factory.mktemp("other_model")
    run = directory / "run"
    recipe = str(write_recipe(directory))
    assert main(["train", recipe, "--run-dir", str(run), "runner.total_env_steps=128"]) == 0
    config = run / "config.yaml"
    text = config.read_text(encoding="utf-8")
    layers = "  hidden_sizes:\n  - 16\n  - 16\n"
    assert layers in text
    config.write_text(text.replace(layers, layers.replace("16", "24")), encoding="utf-8")
    (run / ORIGIN_FILE).unlink()  # else the edit itself is refused, see test_run_files.py
    return run


@pytest.mark.parametrize(
    ("verb", "words"), [("resume", ["runner.total_env_steps=256"]), ("eval", [])]
)
def test_a_checkpoint_of_another_model_is_a_user_error(
    capsys: pytest.CaptureFixture[str], widened_run: Path, verb: str, words: list[str]
) -> None:
    assert main([verb, str(widened_run), *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: The checkpoint is of another model:\n  of another shape:\n")
    assert "[16, 3] there, [24, 3] in the model" in message
    assert "Traceback" not in message


def test_a_file_of_another_model_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], widened_run: Path, tmp_path: Path
) -> None:
    """By its header and what the run says beside it; what may fit is judged by the environment."""
    file = widened_run / "policy.safetensors"
    words = ["train", str(write_recipe(tmp_path)), "--dry-run", f"model.path={file}"]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "model.hidden_sizes=[24,24]"]) == 2
    message = capsys.readouterr().err
    assert "\n  model.path = " in message
    assert f" (command line): {file} is of another model:\n" in message
    assert "[16, 3] there, [24, 3] in the model" in message
    alone = file.rename(tmp_path / file.name)
    try:
        assert main([*words[:-1], f"model.path={alone}", "model.hidden_sizes=[24,24]"]) == 0
    finally:
        alone.rename(file)
