"""Every mistake ends with exit code 2 and a message that names the key and the way out."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from rlinf.cli.main import main
from rlinf.config.dump import to_yaml
from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.envs.metaworld.adapter import task_names
from rlinf.errors import install_command
from rlinf.runners.embodied_config import EmbodiedConfig

ALL = "actor,env,rollout"


def place(value: Any, components: str = ALL) -> str:
    """Return the override that places components."""
    return f"cluster.component_placement={json.dumps({components: value})}"


# Words after `rlinf train quickstart --dry-run`, and what the message must contain.
OVERRIDES: list[tuple[list[str], list[str]]] = [
    # unknown keys, at every level
    (["sed=1"], ["sed = 1 (command line)", "did you mean `seed`?"]),
    (["runer.timeline=true"], ["runer", "did you mean `runner`?"]),
    (["gae_lambda=0.9"], ["did you mean `algorithm.gae_lambda`?"]),
    (["actor.lr=0.1"], ["did you mean `actor.optim.lr`?"]),
    (["env.num_env=3"], ["env.num_env", "did you mean `num_envs`?"]),
    (["env.train.max_step=3"], ["env.train.max_step", "has no key `max_step`"]),
    (["env.train.options.tsk=x"], ["env.train.options.tsk", "did you mean `task`?"]),
    (["rollout.pipeline_stages=2"], ["did you mean `pipeline_stage_num`?"]),
    (["model.hidden_size=[8]"], ["section `model` of type mlp", "did you mean `hidden_sizes`?"]),
    (["algorithm.gae_lamda=1"], ["algorithm.gae_lamda", "did you mean `gae_lambda`?"]),
    (["actor.optim.learning_rate=1"], ["actor.optim.learning_rate", "that is `actor.optim.lr`"]),
    (["actor.optim.rate=1"], ["actor.optim.rate", "known: ", " lr,"]),
    (["checkpoint.keep_lst=1"], ["checkpoint.keep_lst", "did you mean `keep_last`?"]),
    (["logger.backend=[jsonl]"], ["logger.backend", "did you mean `backends`?"]),
    (["evaluation.episode=3"], ["evaluation.episode", "did you mean `episodes`?"]),
    (["cluster.num_node=1"], ["cluster.num_node", "did you mean `num_nodes`?"]),
    (["cluster.plan={env: {}}"], ["no key `env`; `env` is a key of the recipe itself; known: "]),
    # unknown components and choices
    (["task=embodid"], ["task = 'embodid'", "did you mean `embodied`?"]),
    (["~task"], ["`task` is missing", "known: embodied"]),
    (["model.type=mpl"], ["model.type = 'mpl'", "did you mean `mlp`?"]),
    (["~model.type"], ["model.type", "does not say which model"]),
    (["algorithm.type=pppo"], ["algorithm.type", "did you mean `ppo`?"]),
    (["algorithm.type=grpo"], ["algorithm.gamma", "quickstart.yaml line", "of type grpo"]),
    (["env.train.type=metawrld"], ["env.train.type", "did you mean `metaworld`?"]),
    (
        ["env.train.options.task=reach-v9"],
        ["env.train.options.task = 'reach-v9' (command line): ", "did you mean `reach-v3`?"],
    ),
    (
        ["env.train.max_episode_steps=501"],
        ["env.train.max_episode_steps = 501 (command line): ", "nearest: 500"],
    ),
    (["logger.backends=[tensorbord]"], ["logger.backends", "did you mean `tensorboard`?"]),
    (["cluster.runtime=rai"], ["cluster.runtime", "did you mean `ray`?"]),
    (["model.activation=tahn"], ["model.activation", "did you mean `tanh`?"]),
    (["actor.lr_sched.type=cosin"], ["actor.lr_sched.type", "did you mean `cosine`?"]),
    (["algorithm.loss_agg_func=token_mean"], ["did you mean `token-mean`?"]),
    (
        ["env.train.observation_steps=2"],
        ["env.train.observation_steps = 2", "type mlp read the present", "model.type: diffusion"],
    ),
    # wrong types
    (["seed=abc"], ["seed = 'abc'", "must be a whole number"]),
    (["seed=1.5"], ["seed = 1.5", "nearest: 2"]),
    (["seed=None"], ["seed = 'None'", "write null"]),
    (["runner=3"], ["runner = 3", "must be a section"]),
    (["runner.timeline=yes"], ["runner.timeline", "write true"]),
    (["model.hidden_sizes=8"], ["model.hidden_sizes = 8", "for example [8]"]),
    (["logger.backends=jsonl"], ["logger.backends", "for example [jsonl]"]),
    (["actor.optim.lr='1e-3'"], ["actor.optim.lr", "without quotes: 1e-3"]),
    (["env.train=null"], ["env.train", "must be a section"]),
    (["~env.train.max_episode_steps"], ["env.train.max_episode_steps", "is required"]),
    # out of range
    (["seed=-1"], ["seed = -1", ">= 0", "nearest: 0"]),
    (["rollout.steps=0"], ["rollout.steps = 0", "nearest: 1"]),
    (["rollout.steps=1000000000"], ["rollout.steps = 1000000000", "nearest: 1000000"]),
    (["env.num_envs=1000000000"], ["env.num_envs = 1000000000", "nearest: 1000000"]),
    (["model.hidden_sizes=[1000000000]"], ["model.hidden_sizes.0", "nearest: 65536"]),
    (["checkpoint.layout=sharded"], ["checkpoint.layout", "nearest: whole"]),
    (["env.train.processes=0"], ["env.train.processes", "nearest: 1"]),
    (["algorithm.gamma=1.5"], ["algorithm.gamma = 1.5", "nearest: 1"]),
    (["actor.optim.lr=0"], ["actor.optim.lr = 0", "must be > 0"]),
    (["evaluation.stop_at_success=2"], ["evaluation.stop_at_success", "nearest: 1"]),
    (["evaluation.interval=0"], ["evaluation.stop_at_success", "without interval"]),
    (["checkpoint.keep_last=0"], ["checkpoint.keep_last", "nearest: 1"]),
    (["cluster.num_nodes=0"], ["cluster.num_nodes = 0", "1"]),
    # impossible batches
    (
        ["env.num_envs=16", "rollout.steps=50", "actor.global_batch_size=300"],
        ["actor.global_batch_size = 300", "does not divide 800 samples", "nearest: 200, 400"],
    ),
    (["actor.micro_batch_size=100"], ["actor.micro_batch_size = 100", "nearest: 64, 128"]),
    (["env.num_envs=7", "env.train.group_size=2"], ["env.num_envs = 7", "nearest: 6, 8"]),
    (["rollout.pipeline_stage_num=3"], ["env.num_envs = ", "3 pipeline stages"]),
    (
        ["model.num_action_chunks=3", "rollout.steps=64"],
        ["rollout.steps = 64", "model.num_action_chunks", "nearest: 63, 66"],
    ),
    (
        ["~algorithm", "algorithm.type=grpo"],
        ["env.train.group_size", "grpo", "at least 2"],
    ),
    # placement
    ([place("0,0")], ["component_placement", "Resource ranks must be unique"]),
    ([place("1-0")], ["component_placement", "Nearest legal: '0-1'"]),
    ([place("0:1")], ["component_placement", "Process ranks must be in ascending order"]),
    ([place("0-2:0-1")], ["component_placement", "must be divisible"]),
    ([place("0:all")], ["component_placement", "cannot be 'all'"]),
    ([place("x")], ["component_placement", "Invalid rank format 'x'"]),
    ([place("")], ["component_placement"]),
    ([place(1.5)], ["component_placement", "1.5"]),
    ([place("0-")], ["component_placement", "Nearest legal: '0'"]),
    ([place("0-7")], ["component_placement", "out of range"]),
    ([place({"node_grup": "a", "placement": "0"})], ["component_placement", "node_grup"]),
    ([place("0", "actor,env")], ["component_placement", "does not place rollout"]),
    ([place("0", f"{ALL},reward")], ["component_placement", "does not know reward"]),
    (
        [place("0"), "cluster.component_placement.env='0'"],
        ["component_placement", "'env'", "must be unique"],
    ),
    # overrides that are none
    (["seed"], ["'seed' is not of the form key=value"]),
    (["rollout.steps.x=1"], ["`rollout.steps` is the value 64", "quickstart.yaml line"]),
    (["seed=[1"], ["command line: seed", "not a YAML value"]),
    (["seed.x=1"], ["`seed` is the value 0", "quickstart.yaml line"]),
    (["~algorithm.gama"], ["nothing sets `algorithm.gama`", "did you mean `algorithm.gamma`?"]),
    # what the machine cannot give
    (
        ["env.train.python=/no/such/python"],
        ["env.train.python = '/no/such/python' (command line): "],
    ),
    (["runner.output_dir=/dev/null/runs"], ["runner.output_dir", "/dev/null", "not a directory"]),
    (["--run-dir", "/dev/null/run"], ["--run-dir", "/dev/null", "not a directory"]),
    (["--run-dir", "/proc/run"], ["--run-dir", "/proc", "cannot be written"]),
    (["--sed", "3"], ["No such option", "--sed"]),
]

# Contents of a recipe file, and what the message must contain.
FILES: list[tuple[str, list[str]]] = [
    ("base: quickstart\nseed: 1\nseed: 2\n", ["bad.yaml line 3", "`seed` is given twice"]),
    ("base: quickstrat\n", ["bad.yaml line 1", "did you mean `quickstart`?"]),
    ("base: bad.yaml\n", ["form a circle"]),
    ("base: quickstart\nseed: [1\n", ["bad.yaml", "not readable as YAML"]),
    ("- seed\n", ["bad.yaml", "must be a mapping"]),
    ("seed: 3\n", ["`task` is missing"]),
    (
        "policy: {type: act}\nsteps: 9\n",
        ["`task` is missing", "`policy` is model, `steps` is runner."],
    ),
    (
        "runner: {task_type: coding_online_rl}\n",
        ["`task` is missing", "`runner.task_type: coding_online_rl` the nearest is `reasoning`"],
    ),
    ("runner: {task_type: [embodied]}\n", ["`task` is missing"]),
    ("task: embodied\n", ["bad.yaml: ", "env: is required", "model: "]),
    (
        "base: quickstart\nenv:\n  train: {options: {camera: front}}\n",
        ["env.train.options.camera = 'front' (bad.yaml line 3): no camera `front`"],
    ),
    (
        "base: quickstart\n\nalgorithm:\n  gae_lambda: 2\n  gama: 1\n",
        ["2 problems", "gae_lambda = 2 (bad.yaml line 4)", "bad.yaml line 5", "`gamma`?"],
    ),
]

# Whole command lines.
COMMANDS: list[tuple[list[str], list[str]]] = [
    ([], ["Missing argument"]),
    (["quikstart"], ["no recipe 'quikstart'", "did you mean `quickstart`?"]),
    (["no/such/file.yaml"], ["no file or recipe 'no/such/file.yaml'"]),
]


def refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> str:
    """Run the command line; returns the message after checking that it is a user error."""
    code = main(words)
    message = capsys.readouterr().err
    assert code == 2, message
    assert "Traceback" not in message
    return message


def contains(message: str, parts: list[str]) -> None:
    flat = " ".join(message.split())
    for part in parts:
        assert part in flat


def label(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) and len(value) < 3 else ""


@pytest.mark.parametrize(("words", "parts"), OVERRIDES, ids=label)
def test_overrides(capsys: pytest.CaptureFixture[str], words: list[str], parts: list[str]) -> None:
    contains(refused(capsys, ["train", "quickstart", "--dry-run", *words]), parts)


@pytest.mark.parametrize(("text", "parts"), FILES)
def test_files(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    parts: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(text, encoding="utf-8")
    contains(refused(capsys, ["train", "bad.yaml", "--dry-run"]), parts)


@pytest.mark.parametrize(("words", "parts"), COMMANDS)
def test_commands(capsys: pytest.CaptureFixture[str], words: list[str], parts: list[str]) -> None:
    contains(refused(capsys, ["train", *words]), parts)


def test_a_key_that_no_task_has_is_refused_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, ["explain", "nope"]).count("no key `nope`") == 1


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["explain", "gae_lamda"], ["no key `gae_lamda`", "`algorithm.gae_lambda`"]),
        (["explain", "type"], ["several keys end in `type`: ", "`critic.lr_sched.type`"]),
        (["list", "nothing"], ["error: `nothing` is nothing that can be listed; known: algorit"]),
        (
            ["list", "model"],
            ["error: `model` is nothing that can be listed; did you mean `models`?"],
        ),
        (["data", "show", "gone"], ["no demonstrations in gone, which does not exist; ", "record"]),
        (["trian"], ["No such command 'trian'"]),
        (["check", "env", "metawrld"], ["did you mean `metaworld`?"]),
        (["check", "env", "metaworld"], ["options.task", "nothing sets it: Task of MT50, for exa"]),
        (["train", "quickstart", "evaluation.interval=null"], ["empty; the default is 0"]),
        (["explain", "ppo"], ["no key `ppo`", "rlinf list algorithms"]),
        (["eval", "gone", "--token", "x"], ["--token has no effect without --server"]),
        (["check", "env", "metaworld", "options.task="], ["options.task = null", "must be text"]),
        (
            ["check", "env", "genesis", "options.states=true"],
            [
                "unknown option of genesis; env types with it: aloha, behavior, maniskill, ",
                "to drop those of another simulator: ~env.train.options",
                "or ~env.train.N.options of number N of a list",
            ],
        ),
        (["eval", "checkpoints/step_00000120"], ["there is no", "but step_00000020"]),
        (["check", "env", "metaworld", "options.taks=reach-v3"], ["did you mean `task`?"]),
        (
            ["check", "env", "metaworld", "options.task=reach-v9"],
            ["options.task = 'reach-v9' (command line): "],
        ),
        (["resume", "nowhere"], ["no run 'nowhere'"]),
        (["eval", "nowhere"], ["no run 'nowhere'"]),
        (["eval", "nowhere", "--episodes", "0"], ["--episodes"]),
    ],
)
def test_other_verbs(
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "checkpoints" / "step_00000020").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000020" / "manifest.json").touch()
    monkeypatch.chdir(tmp_path)
    contains(refused(capsys, words), parts)


@pytest.mark.parametrize(
    ("missing", "words", "parts"),
    [
        ("metaworld", [], ["'metaworld'", install_command("metaworld")]),
        ("wandb", ["logger.backends=[wandb]"], ["'wandb'", install_command("wandb")]),
        ("ray", ["cluster.runtime=ray"], ["'ray'", install_command("ray")]),
    ],
)
def test_missing_packages(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    missing: str,
    words: list[str],
    parts: list[str],
) -> None:
    monkeypatch.setenv("RLINF_ENVS", str(tmp_path))  # nothing is installed outside of this one
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] == missing else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr("rlinf.flow.placed_config.find_spec", find_spec)
    task_names.cache_clear()
    try:
        contains(refused(capsys, ["train", "quickstart", "--dry-run", *words]), parts)
    finally:
        task_names.cache_clear()


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """A run that was begun, as far as its config goes."""
    path = tmp_path / "run"
    (path / "checkpoints" / "step_00000010").mkdir(parents=True)
    recipe = load_recipe("quickstart")
    config = validate(EmbodiedConfig, recipe.data, recipe)
    (path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    return path


def test_a_resumed_run_keeps_its_model(
    capsys: pytest.CaptureFixture[str], run_directory: Path
) -> None:
    message = refused(
        capsys, ["resume", str(run_directory), "model.hidden_sizes=[8]", "runner.timeline=true"]
    )
    contains(message, ["model.hidden_sizes = [8] (it was [64, 64])", "Changeable: runner"])
    assert "timeline" not in message


def test_the_run_around_a_wrong_path_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs" / "quickstart" / "2026-01-01_00-00-00"
    run.mkdir(parents=True)
    for name in ("config.yaml", "timeline.json"):
        (run / name).touch()
    (run.parent / "latest").symlink_to(run.name)
    monkeypatch.chdir(tmp_path)
    (run / "checkpoints" / "step_00000020").mkdir(parents=True)
    (run / "checkpoints" / "step_00000020" / "manifest.json").touch()
    missing = "quickstart/latest/checkpoints/step_00000120"
    contains(refused(capsys, ["eval", missing]), [missing, "but step_00000020"])
    for given, nearest in (
        ("runs/quickstrat/latest", "did you mean `quickstart/latest`?"),
        ("runs/quickstart/latest/timeline.json", "; nearest: runs/quickstart/latest"),
        ("quickstart", "; nearest: runs/quickstart/latest"),
        ("quickstart/latset", "did you mean `quickstart/latest`?"),
    ):
        contains(refused(capsys, ["view", given]), [given, nearest])
    # The runs of a recipe lie in a directory of its name, which does not take that from it.
    contains(refused(capsys, ["eval", "quickstart"]), ["model.path", "runs/quickstart/latest"])
    contains(refused(capsys, ["eval", "quickstart", "model.path=x.safetensors"]), ["x.safetensors"])


def test_runs_and_checkpoints_are_not_mistaken(
    capsys: pytest.CaptureFixture[str], run_directory: Path, tmp_path: Path
) -> None:
    broken = run_directory / "checkpoints" / "step_00000010"
    contains(refused(capsys, ["eval", str(broken)]), ["no complete checkpoint", "manifest.json"])
    contains(refused(capsys, ["eval", str(tmp_path)]), ["is no run directory"])
    contains(refused(capsys, ["resume", str(tmp_path)]), ["is no run directory"])
    (tmp_path / "config.json").write_text("{}")
    said = ["is no run directory", "it holds a model", "model.path"]
    contains(refused(capsys, ["eval", str(tmp_path)]), said)
    run = str(run_directory)
    contains(refused(capsys, ["eval", run, "--spec", "no.json"]), ["--spec", "no.json"])
    fixed = refused(capsys, ["eval", run, "model.hidden_sizes=[8]", "evaluation.episodes=3"])
    contains(
        fixed,
        [
            "model.hidden_sizes = [8] (it was [64, 64])",
            "Changeable: cluster, weight_sync, env, evaluation",
        ],
    )
    unknown = refused(capsys, ["eval", run, "env.train.options.task=door-closed-v3"])
    contains(unknown, ["env.train.options.task = 'door-closed-v3'", "door-close-v3"])
    spec = tmp_path / "spec.json"
    spec.write_text("{}")
    for both in (
        ["--spec", str(spec), "--episodes", "3"],
        ["--spec", str(spec), "evaluation.success=success_at_end"],
        ["--episodes", "3", "evaluation.episodes=4"],
    ):
        contains(refused(capsys, ["eval", run, *both]), ["exclude each other", both[0]])
    again = ["train", "quickstart", "--dry-run", "--run-dir", run]
    contains(refused(capsys, again), ["holds a run already", "rlinf resume"])


def test_a_good_config_prints_config_batches_and_placement(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["train", "quickstart", "--dry-run", "--seed", "3", "--run-dir", str(tmp_path / "r")]
    assert main(words) == 0
    out = capsys.readouterr().out
    for part in ("seed: 3", "gae_lambda: ", "global batch", "rollout", "nothing was started"):
        assert part in out
    assert sum(line.split()[:2] == ["component", "devices"] for line in out.splitlines()) == 1
    assert not (tmp_path / "r").exists()


PROGRAM = """
import sys
from rlinf.cli.main import main
code = main(sys.argv[1:])
heavy = ("torch", "ray", "mujoco", "metaworld", "tensorboard", "matplotlib")
print(code, [name for name in heavy if name in sys.modules])
"""


@pytest.mark.parametrize(
    "words",
    [
        ["train", "quickstart", "--dry-run"],
        ["train", "quickstart", "algorithm.gae_lamda=1"],
        ["train", "quickstart", "actor.global_batch_size=300"],
        ["list", "algorithms"],
        ["explain", "algorithm"],
    ],
)
def test_nothing_heavy_is_imported_before_a_run(words: list[str]) -> None:
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        cwd=root,
        check=True,
    )
    expected = 2 if "=" in words[-1] else 0
    assert result.stdout.splitlines()[-1] == f"{expected} []"


def test_statistics_are_looked_at_without_anything_heavy(tmp_path: Path) -> None:
    file = tmp_path / "stats.json"
    file.write_text(json.dumps({"action": {"mean": [0.0], "std": [1.0]}}))
    words = ["train", "quickstart", "--dry-run", "~model", "model.type=pi05", "model.preset=tiny"]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words, f"model.statistics={file}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "model.statistics = '" in result.stderr
    assert "the statistics of actions have no q01 and q99, by which" in result.stderr
    assert result.stdout.splitlines()[-1] == "2 []"


def test_the_installed_command_returns_the_exit_code(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("rlinf")
    result = subprocess.run(
        [command, "train", "quickstart", "seed=x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: recipes/quickstart.yaml: 1 problem")
    assert not list(tmp_path.iterdir())


def test_there_are_many_different_ones() -> None:
    assert len(OVERRIDES) + len(FILES) + len(COMMANDS) >= 40


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_directory_that_holds_something_is_refused_and_left_as_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, dry: list[str]
) -> None:
    (tmp_path / "notes.txt").touch()
    words = ["train", "quickstart", *dry, "--run-dir", str(tmp_path)]
    contains(refused(capsys, words), ["is not empty (it holds notes.txt)", "--run-dir"])
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]


def test_a_working_directory_that_was_deleted_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    message = refused(capsys, ["train", "quickstart", "--dry-run"])
    contains(message, ["the working directory was deleted"])


def test_a_key_like_no_other_is_answered_with_the_sections_of_every_task(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = refused(capsys, ["explain", "nosuch"])
    contains(message, ["no key `nosuch`", "actor", "data", "reward", "replay", "warm_start"])


def test_a_ctrl_c_that_a_library_swallows_ends_the_command_before_it_begins() -> None:
    program = """
        import signal
        from contextlib import suppress
        from rlinf.processes.interrupt import note_interrupts
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which may be ignored here
        note_interrupts()
        with suppress(KeyboardInterrupt):  # as a library that is being imported may do
            signal.raise_signal(signal.SIGINT)
        from rlinf.cli.main import main
        raise SystemExit(main(["train", "quickstart", "runner.total_env_steps=400"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 130
    assert "run directory" not in done.stdout
