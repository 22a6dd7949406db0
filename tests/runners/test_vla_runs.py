"""Whole runs of vision-language-action models: what is kept, sent, gone on with, and refused."""

from __future__ import annotations

import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from rlinf.cli.main import main
from rlinf.cli.tasks import read_config, task_of_run
from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.data.episode_evaluation import EvaluationResult
from rlinf.envs.base import instruction_bytes
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.models.policy_weights import load_initial_weights, merged, travelling
from rlinf.monitor.run_directory import RunDirectory
from rlinf.monitor.run_origin import Origin
from rlinf.runners.embodied import Embodied
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.runners.embodied_evaluation import TrainedPolicy
from rlinf.runners.evaluation import evaluate
from rlinf.runners.run import Run
from tests.models.vla.test_loading import PARITY

from . import vla_support
from .killing import Task, kill_and_resume
from .supervised_support import metrics, weights
from .support import assert_equal_runs
from .test_equality import needs_two_cores
from .vla_support import OFT, imitate, train, write_recipe

LORA = ("actor.lora.rank=2", "rollout.block_size=2", "seed=3")
TWO_STEPS = "runner.total_env_steps=64"


@pytest.fixture(scope="module")
def imitated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that imitation left behind."""
    return imitate(tmp_path_factory.mktemp("imitated")) / "policy.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, imitated: Path) -> Path:
    """Two steps of PPO with adapters on what imitation left behind."""
    given = (*LORA, TWO_STEPS, f"model.weights={imitated}")
    return train(tmp_path_factory.mktemp("reinforced"), *given)


def adapted(run: Path) -> dict[str, np.ndarray]:
    """The run's adapters and what is trained whole beside them, by name."""
    kept = weights(run)
    assert all(".lora_" in name or name.startswith("value_head.") for name in kept), kept.keys()
    return kept


def test_it_goes_on_where_imitation_ended(run: Path, imitated: Path) -> None:
    policy = TrainedPolicy(task_of_run(run), run)
    begun = weights(imitated.parent)
    acting = policy.config.build_policy(policy.env_spec()).state_dict()
    frozen = [name for name in begun if name in acting and not name.startswith("value_head.")]
    assert len(frozen) > 50
    for name in frozen:
        assert np.array_equal(acting[name].numpy(), begun[name]), name
    assert [line["actor/optimizer_steps"] > 0 for line in metrics(run)] == [True, True]


def test_an_interrupted_run_equals_one_that_was_not(
    run: Path, imitated: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe").mkdir()
    loaded = load_recipe(
        str(write_recipe(tmp_path / "recipe")),
        [*LORA, TWO_STEPS, f"model.weights={imitated}"],
    )
    config = validate(EmbodiedConfig, loaded.data, loaded)
    killed = tmp_path / "killed"
    shutil.copytree(run, killed)
    shutil.rmtree(killed / "checkpoints" / "step_00000002")
    (killed / "policy.safetensors").unlink()
    with RunDirectory.open(killed) as directory:
        Run(Embodied, config, directory, threading.Event()).run(resume=True)
    assert metrics(run) == metrics(killed)
    for name, value in weights(run).items():
        assert np.array_equal(value, weights(killed)[name]), name


@needs_two_cores
@pytest.mark.slow
def test_placements_are_equal(run: Path, imitated: Path, tmp_path: Path) -> None:
    other = train(
        tmp_path / "other", *LORA, TWO_STEPS, f"model.weights={imitated}",
        "cluster.cpu_devices_per_node=2",
        "cluster.component_placement={env: '0', 'rollout,actor': '1'}",
    )  # fmt: skip
    assert_equal_runs(run, other)


def test_what_is_kept_is_what_was_trained_and_names_its_base(run: Path, imitated: Path) -> None:
    kept = adapted(run)
    with safe_open(run / "policy.safetensors", "np") as file:
        base = file.metadata()["base"]
    assert base.startswith("pi05 tiny, seed 3, then sha256:")
    of_adapters = {name.rpartition(".lora_")[0] for name in kept if ".lora_" in name}
    assert len(of_adapters) > 20
    (checkpoint,) = run.glob("checkpoints/step_00000002")
    largest = max(path.stat().st_size for path in checkpoint.rglob("*") if path.is_file())
    # Three numbers of a weight: itself, and two moments.
    assert largest < 4 * sum(value.nbytes for value in kept.values()) + 200_000
    assert largest < imitated.stat().st_size / 2


def test_adapters_alone_are_sent(run: Path) -> None:
    policy = TrainedPolicy(task_of_run(run), run)
    sent = travelling(policy.config.build_policy(policy.env_spec()))
    own = [t for n, t in sent.items() if ".lora_A" in n or ".lora_B" in n or "value_head" in n]
    assert sum(t.nbytes for t in sent.values()) <= 1.05 * sum(t.nbytes for t in own)


def test_another_base_is_refused(run: Path, imitated: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("seed: 3", "seed: 4"))
    wrong = "trained from other weights .pi05 tiny, seed 3, then sha256:"
    policy = TrainedPolicy(task_of_run(other), other)
    spec = policy.env_spec()
    with pytest.raises(ConfigError, match=wrong):
        policy.build(spec)


@pytest.mark.parametrize("command", [["eval", "--episodes", "2"], ["resume"]])
def test_the_command_line_refuses_another_base(
    run: Path, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("seed: 3", "seed: 4"))
    name, *options = command
    assert main([name, str(other), *options]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert "trained from other weights" in told[-1], told


def test_a_part_on_another_base_is_refused_and_the_whole_is_not(run: Path, imitated: Path) -> None:
    policy = TrainedPolicy(task_of_run(run), run)
    spec: Any = policy.env_spec()
    model = policy.config.model
    plain = model.model_copy(update={"weights": None})
    with pytest.raises(ConfigError, match="was trained from other weights"):
        load_initial_weights(plain.build(spec, value_dim=1, seed=3), run / "policy.safetensors")
    other = plain.build(spec, value_dim=1, seed=11)
    load_initial_weights(other, imitated)
    begun = weights(imitated.parent)
    own = dict(other.named_parameters())
    assert all(torch.equal(own[n].detach(), torch.from_numpy(v)) for n, v in begun.items())


def test_the_whole_policy_goes_with_any_base(run: Path, imitated: Path, tmp_path: Path) -> None:
    assert main(["convert", "run", str(run), "--whole", "--out", str(tmp_path / "whole")]) == 0
    whole = tmp_path / "whole" / "policy.safetensors"
    trained = TrainedPolicy(task_of_run(run), run)
    spec = trained.env_spec()
    policy = trained.build(spec)
    plain = trained.config.model.model_copy(update={"weights": None})
    rows = {name: torch.zeros(2, *shape) for name, shape in spec.observation_shapes.items()}

    def acts_as_trained(file: Path) -> bool:
        other = plain.build(spec, value_dim=1, seed=11)
        load_initial_weights(other, file)
        assert not any(".lora_" in name for name in other.state_dict())
        actions = other.eval().sample(rows, None).actions
        return torch.allclose(actions, policy.sample(rows, None).actions, rtol=1e-5, atol=1e-6)

    assert acts_as_trained(whole)
    assert not acts_as_trained(imitated)
    again = train(tmp_path, *LORA, f"model.weights={whole}")
    assert TrainedPolicy(task_of_run(again), again).step == 1


def test_it_is_evaluated_and_recorded(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run), "--episodes", "2"]) == 0
    assert "success rate" in capsys.readouterr().out
    words = ["record", str(run), "--episodes", "2", "--num-envs", "2"]
    assert main([*words, "--out", str(tmp_path / "episodes")]) == 0


def test_an_evaluation_by_drawn_actions_says_so(run: Path) -> None:
    def played(*overrides: str) -> EvaluationResult:
        found = evaluate(Embodied, run, overrides=overrides, items=4)
        assert isinstance(found, EvaluationResult)
        return found

    drawn = "evaluation.deterministic=false"
    mode, first = played(), played(drawn)
    assert [each.seed for each in mode.outcomes] == [each.seed for each in first.outcomes]
    assert mode.outcomes != first.outcomes
    assert "by drawn actions" in str(first)
    assert "drawn" not in str(mode)
    file = run / "evaluations" / f"spec_{mode.spec_sha256[:12]}_step_00000002.json"
    assert EvaluationResult.load(file) == mode
    assert EvaluationResult.load(file.with_stem(f"{file.stem}_drawn")) == first


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("oft", [False, True], ids=["pi05", "oft"])
def test_killed_at_random_moments(tmp_path: Path, oft: bool) -> None:
    def overrides(runtime: str, steps: int) -> list[str]:
        given = [f"cluster.runtime={runtime}", f"runner.total_env_steps={32 * steps}"]
        return [*given, *LORA, *(OFT if oft else ())]

    task = Task(
        write_recipe=lambda directory: vla_support.write_recipe(directory, *OFT[: 2 * oft]),
        overrides=overrides,
        workers=("EnvW", "RolloutW", "ActorW"),
        pause=0.5,
        compare=assert_equal_runs,
    )
    kill_and_resume(task, tmp_path, "local", kills=2, steps=4, victim="driver")


def test_what_is_no_number_is_neither_seen_nor_trained_on(tmp_path: Path) -> None:
    """Observations with a NaN end their episodes, which do not count; the run goes on."""
    blind = "env.train.options.id=tests.runners.pictures:BlindDot-v0"
    lines = metrics(train(tmp_path, blind, TWO_STEPS, "env.train.max_fault_rate=0.9"))
    assert sum(line.get("env/faults/not_finite", 0) for line in lines) > 0
    assert len(lines) == 2
    assert all(line["actor/skipped_updates"] == 0 for line in lines)
    for name, value in weights(tmp_path / "run").items():
        assert np.isfinite(value).all(), name


FOREIGN = {
    "q01": [-0.01, -0.01], "q99": [0.01, 0.01], "mean": [0.0, 0.0], "std": [0.005, 0.005],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["pi05", "openvla_oft"])
def test_a_set_of_another_robot_than_the_statistics_is_refused_before_training(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, given = vla_support.write_imitation(tmp_path), tmp_path / "norm_stats.json"
    given.write_text(json.dumps({"norm_stats": {"actions": FOREIGN, "state": FOREIGN}}))
    if kind == "openvla_oft":
        recipe.write_text(recipe.read_text().replace(", denoising_steps: 2", ""))
    words = [f"model.type={kind}", f"model.statistics={given}"]
    assert main(["train", str(recipe), "--run-dir", str(tmp_path / "run"), *words]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "data.path: the recorded actions: action dimension 0 goes from -0.8" in told
    assert "in the statistics of the model from -0.01 to 0.01" in told


def test_recorded_observations_without_a_number_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = vla_support.demonstrations()
    shown.observations["states"][11, 1] = np.nan
    shown.save(tmp_path / "episodes")
    recipe = vla_support.write_imitation(tmp_path)
    assert main(["train", str(recipe), "--run-dir", str(tmp_path / "run")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "`states` of" in told
    assert "holds a NaN or an infinity in 1 rows of 1 episodes, first in step 3 of" in told
    assert main(["train", str(recipe), "--dry-run", "data.episodes=[0,2,9]"]) == 2
    assert "has no episode 9; legal: 0 to 4" in " ".join(capsys.readouterr().err.split())
    others = ("data.episodes=[0,2,3]", "data.held_out=1")
    assert imitate(tmp_path, *others).joinpath("policy.safetensors").is_file()


def test_what_a_model_gives_beyond_the_executed_actions_is_learnt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And imitated beside rewards: a row has as many terms as the model gives actions."""
    longer = imitate(tmp_path / "longer", "model.horizon=8", "runner.total_steps=2")
    said = re.search(r"training: 16 rows, (\d+) terms", capsys.readouterr().out)
    executed = 16 * 4 * 2
    assert said is not None
    assert executed < int(said[1]) <= 2 * executed
    shown = f"demonstrations={{path: {longer.parent / 'episodes'}, objective: model}}"
    run = train(tmp_path / "both", "model.horizon=8", shown, TWO_STEPS)
    assert [np.isfinite(line["actor/imitation_loss"]) for line in metrics(run)] == [True, True]


def test_statistics_come_with_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {
        kind: {"q01": [-0.9, -0.7], "q99": [0.8, 1.1], "mean": [0.1, 0.2], "std": [0.3, 0.4]}
        for kind in ("actions", "state")
    }
    file = tmp_path / "statistics.json"
    file.write_text(json.dumps({"norm_stats": given}))
    imitated = imitate(tmp_path, f"model.statistics={file}") / "policy.safetensors"

    def policy(*overrides: str) -> Any:
        words = [f"model.weights={imitated}", *overrides]
        loaded = load_recipe(str(write_recipe(tmp_path)), words)
        config = validate(EmbodiedConfig, loaded.data, loaded)
        config.model.check()
        return config.model.build(EnvSpec.from_json(vla_support.SPEC), value_dim=1, seed=0)

    def bounds(each: Any) -> list[list[float]]:
        return [value.tolist() for value in each._statistics.actions.given().values()]

    named, taken = policy(f"model.statistics={file}"), policy()
    assert bounds(taken) == bounds(named) != []
    assert taken._normalisation == named._normalisation
    assert not caplog.records

    def judged(*overrides: str) -> None:
        judge = f"algorithm={{type: distillation, teacher: {imitated}}}"
        words = ["~algorithm", "~model.value_head", judge, *overrides]
        loaded = load_recipe(str(write_recipe(tmp_path)), words)
        validate(EmbodiedConfig, loaded.data, loaded).check()

    judged(f"model.statistics={file}")
    judged(f"model.statistics={imitated}")
    given["actions"]["q01"][0] = -0.5
    file.write_text(json.dumps({"norm_stats": given}))
    policy(f"model.statistics={file}")
    assert "was trained with other statistics than those of model.statistics" in caplog.text
    for other in ([], [f"model.statistics={file}"]):
        with pytest.raises(ConfigError, match="with other statistics than the model has") as caught:
            judged(*other)
        assert caught.value.key == "algorithm.teacher"
        assert f"nearest: model.statistics: {imitated}" in str(caught.value)


def test_instructions_of_the_simulator_are_read_in_training(tmp_path: Path) -> None:
    told = "env.train.options={id: 'tests.runners.pictures:ToldDot-v0'}"
    run = train(tmp_path, told, "model.max_prompt_tokens=64", TWO_STEPS)
    assert [line["actor/optimizer_steps"] > 0 for line in metrics(run)] == [True, True]
    assert all(line["actor/approx_kl"] < 1 for line in metrics(run))
    trained = TrainedPolicy(task_of_run(run), run)
    spec = trained.env_spec()
    assert spec.observation_shapes["instruction"] == (256,)
    assert spec.control_rate == 10.0
    policy = trained.build(spec)
    rows = {name: torch.zeros(2, *shape) for name, shape in spec.observation_shapes.items()}
    rows["instruction"] = torch.stack(
        [torch.from_numpy(instruction_bytes(text).copy()) for text in ("go left", "go right")]
    )
    actions = policy.sample(rows, None).actions
    assert not torch.equal(actions[0], actions[1])


def test_nothing_to_draw_in_evaluations_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = write_recipe(tmp_path, "model.type=act"), tmp_path / "run"
    words = ["train", str(recipe), "--run-dir", str(run), "model.type=act", "~model.value_head"]
    assert main([*words, "evaluation.deterministic=false"]) == 2
    told = capsys.readouterr()
    assert "evaluation.deterministic: ACTPolicy has nothing to draw" in told.err
    assert "left nothing behind" in told.out
    assert not run.exists()


def published(base: Path) -> Path:
    """A π₀.₅ of two actions and states, with weights that bfloat16 rounds."""
    numbers = {"q01": [-1.0] * 2, "q99": [1.0] * 2, "mean": [0.0] * 2, "std": [1.0] * 2}
    base.mkdir()
    words = tokenizers.models.WordLevel({"<bos>": 0, "<unk>": 1}, unk_token="<unk>")
    tokenizers.Tokenizer(words).save(str(base / "tokenizer.json"))
    held = load_file(PARITY / "pi05" / "model.safetensors")
    odd = {name: each.astype(np.float32) * (1 + 2**-13) for name, each in held.items()}
    save_file({name: each.astype(np.float32) for name, each in odd.items()},
              base / "model.safetensors")  # fmt: skip
    (base / "config.json").write_text(json.dumps({"chunk_size": 8, "vision_heads": 4}))
    given = {"norm_stats": {"actions": numbers, "state": numbers}}
    (base / "norm_stats.json").write_text(json.dumps(given))
    return base


def test_states_that_are_not_shown_are_told_once_in_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = published(tmp_path / "pi05")
    train(
        tmp_path, f"model.path={base}", "model.preset=null",
        "env.train.options.id=tests.runners.pictures:SeenDot-v0",
    )  # fmt: skip
    told = [each for each in caplog.messages if "and the environment shows none" in each]
    assert len(told) == 1


@pytest.mark.parametrize("adapted", [False, True])
def test_weights_that_acting_rounds_are_written_as_they_were_kept(
    tmp_path: Path, adapted: bool
) -> None:
    base = published(tmp_path / "base")
    given = LORA if adapted else ("model.train_expert_only=true",)
    run = train(
        tmp_path, f"model.path={base}", "model.preset=null", "model.state_in_prompt=false",
        "actor.precision.param=bfloat16", *given,
    )  # fmt: skip
    kept, first = weights(run), load_file(base / "model.safetensors")
    expected = kept.get("network.action_out_proj.weight")
    if adapted:
        parts = [kept[f"network.action_out_proj.lora_{part}"] for part in ("B", "A", "scale")]
        second, low, scale = map(torch.from_numpy, parts)
        whole = torch.from_numpy(first["model.action_out_proj.weight"])
        expected = merged(whole, low, second, scale).numpy()
    for words, place in (([], "model."), (["--whole"], "network.")):
        out = tmp_path / f"out{len(words)}"
        assert main(["convert", "run", str(run), *words, "--out", str(out)]) == 0
        written = load_file(out / f"{'policy' if words else 'model'}.safetensors")
        assert np.array_equal(written[f"{place}action_out_proj.weight"], expected)
        if not (words or adapted):
            frozen = [name for name in first if ".paligemma." in name]
            assert len(frozen) > 20
            assert all(np.array_equal(first[name], written[name]) for name in frozen)


def test_a_run_goes_back_to_the_format_that_it_began_from(
    imitated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "began"
    shutil.copytree(Path(__file__).parents[1] / "models" / "visuomotor" / "parity" / "act", base)
    run = train(
        tmp_path, "model.type=act", f"model.path={base}", "model.preset=null",
        "model.cameras=[images.front, images.wrist]", "actor.lora.rank=2",
        "env.train.options={id: 'tests.runners.pictures:TwoViews-v0'}",
    )  # fmt: skip
    out = tmp_path / "published"
    Origin.of(read_config(str(run / "config.yaml"), [])[2]).save(run)
    base = base.rename(tmp_path / "moved")
    assert main(["convert", "run", str(run), "--out", str(out)]) == 2
    assert "error: model.path: " in capsys.readouterr().err
    words = ["convert", "run", str(run), f"model.path={base}", "--out", str(out)]
    assert main(words) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "tensors of run step 1" in told
    assert "left out, as the format has no place for them: log_std, value_head" in told
    first, second = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    changed = [name for name, each in first.items() if not np.array_equal(each, second[name])]
    assert any("decoder" in name for name in changed)
    assert not any("backbone" in name for name in changed)
    assert (out / "config.json").read_text() == (base / "config.json").read_text()
    assert main(words) == 2
    assert "exists; give a new directory" in capsys.readouterr().err
    began = str(imitated.parent)
    assert main(["convert", "run", began, "--out", str(tmp_path / "other")]) == 0
    with (
        safe_open(imitated, "np") as left,
        safe_open(tmp_path / "other" / imitated.name, "np") as written,
    ):
        assert left.metadata() == written.metadata()
        assert list(left.keys()) == list(written.keys())
        for name in left.keys():  # noqa: SIM118
            assert np.array_equal(left.get_tensor(name), written.get_tensor(name)), name


def test_weights_of_another_model_are_refused_before_anything_starts(
    imitated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "policy.safetensors"
    shutil.copy(imitated.parent / "env_spec.json", tmp_path)
    kept = load_file(imitated)
    kept["network.other"] = kept.pop(min(name for name in kept if name.startswith("network.")))
    save_file(kept, other)
    words = ["train", str(write_recipe(tmp_path)), "--dry-run", "model.type=pi05"]
    assert main([*words, f"model.weights={imitated}"]) == 0
    capsys.readouterr()
    assert main([*words, f"model.weights={other}"]) == 2
    told = capsys.readouterr().err
    assert "model.weights = " in told
    assert f"{other} is of another model:" in told
    assert main([*words[:-1], "model.type=pi0", f"model.weights={imitated}"]) == 2
    assert "is of a model of type pi05, not pi0; nearest: " in capsys.readouterr().err
