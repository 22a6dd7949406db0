"""``rlinf plan``: from measurements to a plan, and what it says where there are none."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic_core import PydanticCustomError

from rlinf.cli.main import main
from rlinf.cli.tasks import read_config
from rlinf.cli.view import run_report
from rlinf.config.component import illegal
from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.flow.plan import PLAN_FILE, Plan
from rlinf.monitor.timeline import read_timeline
from rlinf.planner import kept_profiles, planned, profiling
from rlinf.planner.planned import legal_trials
from rlinf.planner.profile import ComponentProfile, Measurement, Profile
from rlinf.runners.embodied_config import EmbodiedConfig

from ..runners import off_policy_support, reasoning_support, supervised_support
from ..runners.support import small_config, write_recipe

SLOTS = "cluster.cpu_devices_per_node=2"


@pytest.fixture(autouse=True)
def _two_slots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def measured(seconds: dict[int, float]) -> ComponentProfile:
    """A component that takes so long on so many devices, for the 8 items of the small recipe."""
    return ComponentProfile(
        measurements=tuple(
            Measurement(
                items=items,
                devices=devices,
                seconds=t * items / 8,
                device_kind="cpu",
                origin="a test",
            )
            for devices, t in seconds.items()
            for items in (4, 8)
        )
    )


def profile_of(directory: Path) -> Profile:
    """Environments gain by two devices, policy and actor do not."""
    return kept_profiles.fingerprints(small_config(directory, SLOTS)).profile(
        {
            "env": measured({1: 4.0, 2: 2.0}),
            "rollout": measured({1: 1.0, 2: 1.0}),
            "actor": measured({1: 1.0, 2: 1.5}),
        }
    )


def test_plan_alternatives_and_the_command_that_runs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_of(tmp_path).save(tmp_path / "profile.json")
    recipe = str(write_recipe(tmp_path))
    assert main(["plan", recipe, SLOTS, "--profile", str(tmp_path / "profile.json")]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = {line.split()[0]: line.split() for line in captured.out.splitlines() if line.strip()}
    assert rows["env"][1] == "0-1"
    assert rows["actor"][1] in ("0", "1")
    step = re.search(r"predicted step: ([\d.]+) s", captured.out)
    assert step is not None
    assert float(step[1]) == pytest.approx(4.0, abs=0.05)  # 2 + 1 + 1 in turns
    alternatives = re.findall(r"^\d\. ([\d.]+) s \(\+", captured.out, re.MULTILINE)
    assert 1 <= len(alternatives) <= 3
    assert all(float(seconds) >= float(step[1]) for seconds in alternatives)

    [command] = [line for line in captured.out.splitlines() if line.startswith("run it: ")]
    words = shlex.split(command.removeprefix("run it: "))
    assert words[:3] == ["rlinf", "train", recipe]
    loaded = load_recipe(recipe, words[3:])
    assert validate(EmbodiedConfig, loaded.data, loaded).plan.components["env"].devices == (0, 1)


@pytest.mark.parametrize(("taken", "longer"), [(2.5, True), (6.0, False)])
def test_a_plan_is_compared_with_the_recipe_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], taken: float, longer: bool
) -> None:
    placed = "cluster.component_placement={env: '0:0-3', 'rollout,actor': '0'}"
    step = kept_profiles.placed_step(small_config(tmp_path, SLOTS, placed), taken, "a test")
    profile = profile_of(tmp_path).model_copy(update={"steps": (step,)})
    profile.save(tmp_path / "profile.json")
    words = [
        "plan",
        str(write_recipe(tmp_path)),
        SLOTS,
        "--profile",
        str(tmp_path / "profile.json"),
    ]
    assert main([*words, placed]) == 0
    out = capsys.readouterr().out
    assert f"measured step of the recipe as it is: {taken:.4g} s" in out
    assert (re.search(r"predicted to take \d+\.\d % longer; keep", out) is not None) == longer
    for others in ([], [placed, "env.num_envs=16"], [placed, "--cluster", "1x2"]):
        assert main([*words, *others]) == 0
        assert "measured step" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "write",
    [
        off_policy_support.write_recipe,
        supervised_support.write_fine_tuning,
        supervised_support.write_cloning,
    ],
    ids=["off_policy", "sft", "behaviour_cloning"],
)
@pytest.mark.parametrize("saved", [False, True])
def test_runs_of_every_family_accept_the_plan_that_is_found(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path], Path],
    saved: bool,
) -> None:
    recipe = str(write(tmp_path))
    task, _, config = read_config(recipe, [SLOTS])
    staged = {stage.component for _, stage in task.flow(config).stages()}
    costs = {name: measured({1: 1.0, 2: 2.0}) for name in staged}
    kept_profiles.fingerprints(config).profile(costs).save(tmp_path / "profile.json")
    words = ["--profile", str(tmp_path / "profile.json")]
    words += ["--save", str(tmp_path / "plan.yaml")] if saved else []
    assert main(["plan", recipe, SLOTS, *words]) == 0
    [command] = [line for line in capsys.readouterr().out.splitlines() if "run it: " in line]
    _, _, found = read_config(recipe, shlex.split(command)[5:])
    assert found.plan.components.keys() == {*found.components} >= staged
    # Who only evaluates is where it is in a placement that does not name it.
    others = {found.plan.components[name].placement for name in {*found.components} - staged}
    assert others <= {"0"}


def test_what_a_trainer_was_told_to_give_back_is_given_back_under_every_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    away, recipe = "cluster.residency={actor: offload}", str(write_recipe(tmp_path))
    profile_of(tmp_path).save(tmp_path / "profile.json")
    words = [SLOTS, away, "--profile", str(tmp_path / "profile.json")]
    assert main(["plan", recipe, *words]) == 0
    [command] = [line for line in capsys.readouterr().out.splitlines() if "run it: " in line]
    _, _, found = read_config(recipe, shlex.split(command)[5:])
    _, _, config = read_config(recipe, [SLOTS, away])
    trials = [trial for _, trial in legal_trials(config)]
    assert len(trials) > 3
    for each in (found, *trials):
        parts = {name: part.residency for name, part in each.plan.components.items()}
        assert parts == {"env": "resident", "rollout": "resident", "actor": "offload"}


def test_the_command_of_a_plan_repeats_nothing_that_it_replaces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_of(tmp_path).save(tmp_path / "profile.json")
    recipe, kept = str(write_recipe(tmp_path)), "seed=3"
    placed = "cluster.component_placement={'env,rollout': '0', actor: '1'}"
    replaced = [placed, "cluster.residency.env=resident"]
    words = ["--profile", str(tmp_path / "profile.json")]
    assert main(["plan", recipe, SLOTS, *replaced, kept, *words]) == 0
    [command] = [line for line in capsys.readouterr().out.splitlines() if "run it: " in line]
    said = shlex.split(command)[5:]
    assert said[:2] == [SLOTS, kept]
    assert len(said) == 3
    assert not set(said) & {*replaced, "~cluster.component_placement", "~cluster.residency"}
    loaded = load_recipe(recipe, said)
    assert validate(EmbodiedConfig, loaded.data, loaded).plan.components["env"].devices == (0, 1)


@pytest.mark.parametrize("given", ["auto", "{auto: {steps: 2}}"])
def test_the_command_of_a_plan_has_it_instead_of_the_one_that_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    profile_of(tmp_path).save(tmp_path / "profile.json")
    recipe, words = str(write_recipe(tmp_path)), ["--profile", str(tmp_path / "profile.json")]
    assert main(["plan", recipe, SLOTS, f"cluster.plan={given}", *words]) == 0
    [command] = [line for line in capsys.readouterr().out.splitlines() if "run it: " in line]
    slots, plan = shlex.split(command)[5:]
    assert slots == SLOTS
    assert plan.startswith('cluster.plan={"components": ')
    # A section of the file is dropped, as the plan would be merged into it.
    Path(recipe).write_text(Path(recipe).read_text() + "\ncluster: {plan: {auto: {steps: 2}}}\n")
    assert main(["plan", recipe, SLOTS, f"cluster.plan={given}", *words]) == 0
    [command] = [line for line in capsys.readouterr().out.splitlines() if "run it: " in line]
    assert shlex.split(command)[5:] == [SLOTS, "~cluster.plan", plan]


def test_a_saved_plan_is_what_a_run_is_under(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_of(tmp_path).save(tmp_path / "profile.json")
    recipe, file = str(write_recipe(tmp_path)), tmp_path / "plan.yaml"
    words = ["--profile", str(tmp_path / "profile.json"), "--save", str(file)]
    assert main(["plan", recipe, SLOTS, *words]) == 0
    [command] = [line for line in capsys.readouterr().out.splitlines() if "run it: " in line]
    assert shlex.split(command)[2:] == ["rlinf", "train", recipe, SLOTS, f"cluster.plan={file}"]
    plan = Plan.load(file)
    assert plan.components["env"].devices == (0, 1)
    assert "env" in plan.components["env"].reason
    assert main(["plan", recipe, SLOTS, *words]) == 0  # it replaces a plan, and no recipe
    kept = Path(recipe).read_bytes()
    assert main(["plan", recipe, SLOTS, *words[:3], recipe]) == 2
    assert "exists and is something else; give a new file" in capsys.readouterr().err
    assert Path(recipe).read_bytes() == kept

    run = tmp_path / "run"
    short = ["runner.total_env_steps=128", "runner.timeline=true", "logger.backends=[]"]
    given = [recipe, SLOTS, f"cluster.plan={file}", *short]
    assert main(["train", *given, "--run-dir", str(run)]) == 0
    assert Plan.load(run / PLAN_FILE) == plan
    stages = [e for e in read_timeline(run / "timeline.json") if e.get("cat") == "stage"]
    for name, part in plan.components.items():
        own = {tuple(e["args"]["devices"]) for e in stages if e["args"]["component"] == name}
        assert own == {part.of_process(rank) for rank in range(part.processes)}
    # What a run directory holds does not need the file.
    file.unlink()
    assert run_report(run).plan == plan.model_dump(mode="json")["components"]


def test_a_kept_profile_is_found_and_another_machine_can_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept_profiles.keep_profile(profile_of(tmp_path), "embodied")
    recipe = str(write_recipe(tmp_path))
    assert main(["plan", recipe, SLOTS]) == 0
    out = capsys.readouterr().out
    assert "plan for 1 node × 2 CPU slots" in out
    assert "predicted memory of one CPU slot: not measured" in out
    assert main(["plan", recipe, SLOTS, "--cluster", "1x1"]) == 0
    out = capsys.readouterr().out
    assert "plan for 1 node × 1 CPU slot" in out
    assert "predicted step: 6" in out


def test_without_measurements_it_says_how_they_are_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(write_recipe(tmp_path))
    assert main(["plan", recipe, SLOTS]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"no measurements to plan {recipe} with (none is kept)" in told
    assert shlex.join(["rlinf", "plan", recipe, SLOTS, "--measure"]) in told


@pytest.mark.parametrize("asked", ["1x8:H100", "1x8:H100,1x8:RTX4090"])
def test_times_of_a_cpu_are_no_prediction_for_an_accelerator(
    tmp_path: Path, asked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept_profiles.keep_profile(profile_of(tmp_path), "embodied")
    assert main(["plan", str(write_recipe(tmp_path)), SLOTS, "--cluster", asked]) == 2
    captured = capsys.readouterr()
    assert "predicted" not in captured.out
    assert "'env' was measured on cpu; the cluster has H100" in captured.err


def test_figures_without_a_kind_are_said_where_a_kind_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = profile_of(tmp_path).model_dump_json().replace('"device_kind":"cpu"', '"device_kind":""')
    (tmp_path / "profile.json").write_text(text)
    words = ["--profile", str(tmp_path / "profile.json"), "--cluster", "1x2:H100"]
    assert main(["plan", str(write_recipe(tmp_path)), SLOTS, *words]) == 0
    out = capsys.readouterr().out
    assert "plan for 1 node × 2 H100" in out
    assert (
        "env, rollout, actor: figures that name no kind of device, taken for those of H100" in out
    )
    assert "cluster.accelerators_per_node=2" in out
    assert "cluster.cpu_devices_per_node=null" in out


def test_the_command_for_another_machine_describes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept_profiles.keep_profile(profile_of(tmp_path), "embodied")
    recipe = str(write_recipe(tmp_path))
    for asked, devices, runtime in (("1x1", 1, "local"), ("2x1", 2, "ray")):
        assert main(["plan", recipe, SLOTS, "--cluster", asked]) == 0
        out = capsys.readouterr().out
        [command] = [line for line in out.splitlines() if line.startswith("run it: ")]
        loaded = load_recipe(recipe, shlex.split(command)[5:])
        config = validate(EmbodiedConfig, loaded.data, loaded)
        assert (config.devices, config.cluster.runtime) == (devices, runtime)


def test_a_faster_plan_that_the_recipe_refuses_is_said_and_not_offered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile_of(tmp_path).save(tmp_path / "profile.json")
    original = EmbodiedConfig.problems

    def no_divided_pair(config: EmbodiedConfig) -> Iterator[PydanticCustomError]:
        """A rule between components, which no constraint of one of them says."""
        yield from original(config)
        if config.world_size("env") == config.world_size("rollout") == 2:
            yield illegal("cluster.component_placement", "divides both", hint="nearest: one")

    monkeypatch.setattr(EmbodiedConfig, "problems", no_divided_pair)
    recipe = str(write_recipe(tmp_path))
    assert main(["plan", recipe, SLOTS, "--profile", str(tmp_path / "profile.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    [said] = [line for line in lines if "passed over" in line]
    assert "divides both" in said
    [command] = [line for line in lines if line.startswith("run it: ")]
    loaded = load_recipe(recipe, shlex.split(command)[5:])
    placed = validate(EmbodiedConfig, loaded.data, loaded)
    assert not placed.world_size("env") == placed.world_size("rollout") == 2


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_memory_of_threads_is_said_to_be_growth(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], runtime: str
) -> None:
    held = {
        name: part.model_copy(
            update={
                "measurements": tuple(
                    m.model_copy(update={"peak_bytes": 3 * 2**20}) for m in part.measurements
                )
            }
        )
        for name, part in profile_of(tmp_path).components.items()
    }
    profile_of(tmp_path).model_copy(update={"components": held}).save(tmp_path / "profile.json")
    words = [SLOTS, f"cluster.runtime={runtime}", "--profile", str(tmp_path / "profile.json")]
    assert main(["plan", str(write_recipe(tmp_path)), *words]) == 0
    out = capsys.readouterr().out
    assert re.search(r"predicted memory of one CPU slot: \d+ MiB", out)
    assert ("what it held before is not in it" in out) == (runtime == "local")


@pytest.mark.parametrize("switch", [None, 0.0])
def test_a_switch_that_was_not_measured_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], switch: float | None
) -> None:
    gigabytes = {"rollout": (50, 40), "reward": (1, 1), "actor": (60, 30)}
    parts = {
        name: ComponentProfile(
            measurements=(
                Measurement(
                    items=16, devices=1, seconds=1.0, peak_bytes=peak * 10**9, origin="a test"
                ),
            ),
            resident_bytes=kept * 10**9,
            onload_seconds=switch,
            offload_seconds=switch,
        )
        for name, (peak, kept) in gigabytes.items()
    }
    measured = Profile(hardware="h", model="m", config="c", components=parts)
    measured.save(tmp_path / "profile.json")
    recipe = str(reasoning_support.write_recipe(tmp_path))
    words = ["--profile", str(tmp_path / "profile.json"), "--cluster", "1x1:GPU/80GB"]
    assert main(["plan", recipe, *words]) == 0
    said = re.findall(r"^not measured: switch of (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert bool(said) == (switch is None)
    assert all(words.endswith(", taken as 0 s") for words in said)


def test_a_profile_of_something_else_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = profile_of(tmp_path).model_copy(update={"hardware": "8x H100"})
    kept = kept_profiles.keep_profile(other, "embodied")
    recipe = str(write_recipe(tmp_path))
    assert main(["plan", recipe, SLOTS]) == 2
    err = capsys.readouterr().err
    assert "8x H100" in err
    assert "--measure" in err
    # Given by hand it is used, and the difference is said.
    assert main(["plan", recipe, SLOTS, "--profile", str(kept)]) == 0
    assert "note: " in (captured := capsys.readouterr()).err
    assert "8x H100" in captured.err


def test_of_a_profile_of_another_recipe_a_few_differences_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept_profiles.keep_profile(profile_of(tmp_path), "embodied")
    other = [
        "algorithm.gamma=0.5", "actor.update_epoch=3", "actor.optim.lr=0.5", "actor.optim.eps=0.5",
        "env.train.max_episode_steps=20",
    ]  # fmt: skip
    assert main(["plan", str(write_recipe(tmp_path)), SLOTS, *other]) == 2
    err = capsys.readouterr().err
    assert err.count("the profile was measured with") == 3
    assert re.search(r"; and \d+ more\)\. Measure it", err)


def test_what_was_measured_is_planned_with_also_where_it_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = [t for t in planned.legal_trials(small_config(tmp_path)) if t[1].planning.items == 8]
    monkeypatch.setattr(profiling, "legal_trials", lambda config: iter(trials[:1]))
    # No process can make a directory there, not even that of an administrator.
    (tmp_path / "cache").write_text("a file\n")
    assert main(["plan", str(write_recipe(tmp_path)), "--measure"]) == 0
    captured = capsys.readouterr()
    assert re.search(r"warning: the profile was not kept \(.*cache.*\)", captured.err)
    assert "predicted step: " in captured.out
    assert "run it: " in captured.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--measure"),
        (["--profile", "nothing.json"], "profile 'nothing.json' cannot be read"),
        (["--profile", "."], "is a directory; give a file, such as profile.json of a run"),
        (["--measure", "--profile", "a.json"], "exclude each other"),
        (["--save", "a.json", "--timeline", "./a.json"], "--save and --timeline both name"),
        (["--limit", "4G"], "no effect without --memory"),
        (["--memory", "--limit", "much"], "no amount of memory; write 512M or 8G"),
        (["--memory", "--measure"], "give it alone"),
        (["--cluster", "512"], "for 512 nodes of 8 H100 write 512x8:H100"),
    ],
)
def test_what_cannot_be_planned(
    tmp_path: Path, words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(write_recipe(tmp_path)), *words]) == 2
    assert expected in capsys.readouterr().err
