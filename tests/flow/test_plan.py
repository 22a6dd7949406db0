import re

import pytest

from rlinf.config.dump import to_data, to_yaml
from rlinf.config.load import load_recipe
from rlinf.config.validate import validate
from rlinf.errors import ConfigError
from rlinf.flow.plan import ComponentPlan, Plan
from rlinf.planner.planned import placed_by
from rlinf.runners.embodied_config import EmbodiedConfig
from rlinf.scheduler.component_grammar import parse_component_placement
from tests.runners import reasoning_support
from tests.runners.support import small_config

SLOTS = "cluster.cpu_devices_per_node=4"


def plan(**devices: tuple[int, ...]) -> Plan:
    return Plan(
        components={
            name: ComponentPlan(devices=given, processes=len(given))
            for name, given in devices.items()
        }
    )


@pytest.mark.parametrize(
    ("devices", "mode"),
    [
        ({"env": (0, 1), "rollout": (0, 1), "actor": (0, 1)}, "collocated"),
        ({"env": (0,), "rollout": (1,), "actor": (2,)}, "disaggregated"),
        ({"env": (0,), "rollout": (1,), "actor": (0, 1)}, "hybrid"),
    ],
)
def test_mode_is_read_off_the_devices(devices, mode):
    assert plan(**devices).mode == mode


def test_overlap_and_devices_of_several_components():
    both = plan(env=(0,), rollout=(1,), actor=(1, 2))
    assert both.devices(("env", "rollout")) == (0, 1)
    assert both.overlap(("env", "rollout"), ("actor",))
    assert not both.overlap(("env",), ("actor",))


def test_a_plan_survives_being_written_and_read():
    before = plan(env=(0,), rollout=(1,), actor=(0, 1))
    assert Plan.model_validate_json(before.model_dump_json()) == before


def test_the_same_places_are_the_same_for_any_reason():
    before = plan(env=(0,), actor=(0, 1))
    part = before.components["env"]
    told = before.model_copy(
        update={"components": {**before.components, "env": part.model_copy(
            update={"reason": "faster", "predicted_seconds": 2.0})}}
    )  # fmt: skip
    assert told != before
    assert told.same_places(before)
    assert not plan(env=(0, 1), actor=(0, 1)).same_places(before)
    assert not plan(env=(0,)).same_places(before)
    away = before.with_residency({"actor": "offload"}, sharing=())
    assert not away.same_places(before)


def residencies(changed: Plan) -> dict[str, str]:
    return {name: component.residency for name, component in changed.components.items()}


def test_those_that_share_a_device_offload_where_they_can():
    before = plan(rollout=(0, 1), reward=(0,), actor=(1,), critic=(2,))
    after = before.with_residency({}, sharing=("rollout", "actor", "critic"))
    assert residencies(after) == {
        "rollout": "offload", "reward": "resident", "actor": "offload", "critic": "resident",
    }  # fmt: skip
    assert "shares a device with rollout" in after.components["actor"].reason
    assert residencies(before) == dict.fromkeys(before.components, "resident")


def test_residency_by_hand_wins():
    before = plan(rollout=(0,), actor=(0,), critic=(1,))
    after = before.with_residency(
        {"actor": "resident", "critic": "offload"}, sharing=("rollout", "actor", "critic")
    )
    assert residencies(after) == {"rollout": "offload", "actor": "resident", "critic": "offload"}
    assert "by hand" in after.components["critic"].reason
    assert any("offload" in row for row in after.table()[1:])


def test_a_plan_switches_more_where_it_offloads_more_and_differs_in_nothing_else():
    before = plan(env=(0, 1), actor=(0, 1))
    away = before.with_residency({"actor": "offload"}, sharing=())
    assert away.switches_more_than(before)
    assert not before.switches_more_than(away)
    assert not before.switches_more_than(before)
    assert not away.switches_more_than(plan(env=(0,), actor=(0, 1)))


# -- a plan as input ----------------------------------------------------------------------------

PARTS = {
    "env": "{devices: 0-1, pipeline_stages: 2}",
    "rollout": "{devices: 2-3, processes: 1, pipeline_stages: 2}",
    "actor": "{devices: 0}",
}


@pytest.fixture
def _slots(monkeypatch):
    monkeypatch.setenv("RLINF_OVERSUBSCRIBE_CPU_SLOTS", "1")


def said(**changed):
    """A plan as the command line gives it."""
    parts = {name: part for name, part in {**PARTS, **changed}.items() if part is not None}
    return f"cluster.plan={{components: {{{', '.join(f'{n}: {p}' for n, p in parts.items())}}}}}"


def planned(directory, *overrides, **changed):
    return small_config(directory, SLOTS, said(**changed), *overrides)


@pytest.mark.usefixtures("_slots")
def test_a_plan_is_executed_as_it_is_written(tmp_path):
    config = planned(tmp_path)
    parts = config.plan.components
    assert {name: part.devices for name, part in parts.items()} == {
        "env": (0, 1), "rollout": (2, 3), "actor": (0,),
    }  # fmt: skip
    assert {name: part.processes for name, part in parts.items()} == {
        "env": 2, "rollout": 1, "actor": 1,
    }  # fmt: skip
    assert config.rollout.pipeline_stage_num == 2
    assert config.placement() == {"env": "0-1", "rollout": "2-3:0", "actor": "0"}


@pytest.mark.usefixtures("_slots")
def test_a_file_says_the_same_and_the_config_of_a_run_holds_it(tmp_path):
    config = planned(tmp_path)
    config.plan.save(tmp_path / "plan.yaml")
    (tmp_path / "plan.json").write_text(config.plan.model_dump_json())
    for file in ("plan.yaml", "plan.json"):
        again = small_config(tmp_path, SLOTS, f"cluster.plan={tmp_path / file}")
        assert again == config
    # What a run directory holds does not depend on the file.
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    kept = load_recipe(str(tmp_path / "run.yaml"))
    assert validate(EmbodiedConfig, kept.data, kept) == config


UNEVEN = {"0:0-2,1:3": ((0,), (0,), (0,), (1,)), "0:0,1-2:1": ((0,), (1, 2))}


@pytest.mark.parametrize("text", UNEVEN)
@pytest.mark.usefixtures("_slots")
def test_a_plan_says_which_process_has_which_device_where_they_share_them_unevenly(tmp_path, text):
    key = "cluster.component_placement={'env,actor': '0', rollout: '" + text + "'}"
    # Four processes act on sub-batches of their own.
    more = ("env.num_envs=8", "rollout.pipeline_stage_num=4")
    config = small_config(tmp_path, SLOTS, key, *more)
    part = config.plan.components["rollout"]
    assert tuple(map(part.of_process, range(part.processes))) == UNEVEN[text]
    row = next(row for row in config.plan.table() if row[0] == "rollout")
    assert row[1:3] == (text, str(len(UNEVEN[text])))
    config.plan.save(tmp_path / "plan.yaml")
    again = small_config(tmp_path, SLOTS, f"cluster.plan={tmp_path / 'plan.yaml'}", more[0])
    assert again.plan == config.plan
    placed = {entry.components[0]: entry for entry in parse_component_placement(again.placement())}
    assert tuple(placed["rollout"].processes()) == UNEVEN[text]
    assert not again.plan.same_places(plan(env=(0,), rollout=part.devices, actor=(0,)))


def test_processes_that_share_devices_evenly_need_no_more_than_their_number():
    for text, processes in (
        ("0-3:0-1", ((0, 1), (2, 3))),
        ("0:0-1,1:2-3", ((0,), (0,), (1,), (1,))),
    ):
        part = ComponentPlan.of_processes(processes)
        assert part == ComponentPlan(devices=part.devices, processes=len(processes))
        assert part == ComponentPlan.model_validate({"devices": text})


@pytest.mark.usefixtures("_slots")
def test_a_plan_that_was_found_is_the_config_as_it_is(tmp_path):
    found = planned(tmp_path).plan
    told = {"reason": "env-bound", "predicted_seconds": 1.5}
    parts = {name: part.model_copy(update=told) for name, part in found.components.items()}
    found = found.model_copy(update={"components": parts})
    placement = "cluster.component_placement={'env,rollout,actor': '0-1'}"
    config = placed_by(small_config(tmp_path, SLOTS, placement), found)
    assert config.plan is found
    assert config.rollout.pipeline_stage_num == 2
    assert to_data(config)["cluster"]["plan"]["components"]["env"]["predicted_seconds"] == 1.5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"polcy": "{devices: 0}"}, r"components\.polcy.* no component polcy"),
        ({"rolout": "{devices: 0}"}, r"no component rolout; did you mean `rollout`"),
        ({"actor": None}, r"does not place actor; the components are env, rollout, actor"),
        ({"actor": "{devices: 0-4}"}, r"actor\.devices .*device 4; the cluster has 0-3; .*: 0-3"),
        (
            {"env": "{devices: 0-2, processes: 2, pipeline_stages: 2}"},
            r"env\.processes = 2 .*do not share 3 devices evenly; nearest: 1, 3",
        ),
        (
            {"rollout": "{devices: '1,3', processes: 1, pipeline_stages: 2}"},
            r"some that are apart.*nearest: 0-1",
        ),
        (
            {"env": "{devices: 0-1, pipeline_stages: 2, residency: offload}"},
            r"env has nothing to offload; nearest: resident; components that have: actor",
        ),
        ({"actor": "{devices: 0, pipeline_stages: 2}"}, r"is in no loop that has .*nearest: 1"),
        ({"env": "{devices: 0-1}"}, r"env has 2 sub-batches in flight in its loop; nearest: 2"),
        ({"env": "{devices: 0-1, granularity: 2}"}, r"has no key `granularity`"),
        ({"env": "{devices: a}"}, r"env\.devices = 'a'.*expected a number or 'first-last'"),
        ({"env": "{processes: 2}"}, r"env\.devices.*is required"),
        ({"env": "{devices: all}"}, r"env\.devices = 'all'.*write its devices, such as 0-3"),
        ({"env": "{devices: ''}"}, r"env\.devices = ''.*write its devices, such as 0-3"),
        ({"env": "{devices: '0,0'}"}, r"env\.devices = '0,0'.*names a resource twice"),
        ({"env": "{devices: '0-1:0-2'}"}, r"env\.devices = '0-1:0-2'.*Nearest legal: '0-1:0-1'"),
        ({"env": "{devices: '0:0-2,1:3', processes: 2}"}, r"env\.processes = 2 .*is 2, and the"),
        ({"env": "{devices: 0-1, spread: [[0], [0], [1]]}"}, r"env\.spread.*is what `devices` say"),
        ({"env": "{devices: null}"}, r"env\.devices.*null"),
        ({"env": "{devices: 0, processes: 1000000000}"}, r"env\.processes = 1000000000 .*65536"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("_slots")
def test_what_cannot_be_executed_is_refused_before_anything_starts(tmp_path, changed, message):
    with pytest.raises(ConfigError) as refused:
        planned(tmp_path, **changed)
    assert re.search(message, str(refused.value)), refused.value
    assert "cluster.plan" in str(refused.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "cluster.component_placement={env: 0}",
            r"as cluster\.component_placement does; drop one: ~cluster\.component_placement",
        ),
        (
            "cluster.residency={actor: resident}",
            r"as cluster\.residency does; drop one: ~cluster\.residency",
        ),
        (
            "rollout.pipeline_stage_num=1",
            r"rollout\.pipeline_stage_num = 1 .*cluster.plan has 2 pipeline stages; drop one",
        ),
        ("rollout=3", r"rollout = 3 .*must be a section"),
        ("runner.plan=auto", r"runner\.plan = 'auto' .*is now cluster\.plan"),
        ("cluster.plan.version=2", r"cluster\.plan\.version = 2 .*must be 1"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("_slots")
def test_a_plan_beside_another_word_on_places_is_refused(tmp_path, override, message):
    with pytest.raises(ConfigError) as refused:
        planned(tmp_path, override)
    assert re.search(message, str(refused.value)), refused.value


def test_a_file_that_is_no_plan_says_so(tmp_path):
    (tmp_path / "plan.yaml").write_text("components: {env: {devices: -1}}\n")
    with pytest.raises(ConfigError, match=r"plan\.yaml.*components\.env\.devices"):
        small_config(tmp_path, f"cluster.plan={tmp_path / 'plan.yaml'}")
    with pytest.raises(ConfigError, match=r"'nothing\.yaml' cannot be read: No such file"):
        small_config(tmp_path, "cluster.plan=nothing.yaml")
    (tmp_path / "config.yaml").write_text("task: embodied\nseed: 0\n")
    with pytest.raises(ConfigError, match=r"config\.yaml' is no plan: .*; nearest: .*plan\.yaml"):
        small_config(tmp_path, f"cluster.plan={tmp_path / 'config.yaml'}")
    parts = ", ".join(f"{name}: {{measurements: 1}}" for name in "abcdef")
    (tmp_path / "profile.json").write_text(f"components: {{{parts}}}\n")
    with pytest.raises(ConfigError, match=r"12 problems; .*devices.*; …; a file, or auto") as told:
        small_config(tmp_path, f"cluster.plan={tmp_path / 'profile.json'}")
    assert len(str(told.value)) < 1000
    assert ".processes: is required" not in str(told.value)  # they follow from the devices


def test_a_plan_says_who_gives_its_memory_back(tmp_path):
    parts = {
        "rollout": "{devices: 0}",
        "reward": "{devices: 0}",
        "actor": "{devices: 0, residency: offload}",
    }
    words = ", ".join(f"{name}: {part}" for name, part in parts.items())
    config = reasoning_support.small_config(tmp_path, f"cluster.plan={{components: {{{words}}}}}")
    assert residencies(config.plan) == {
        "rollout": "resident", "reward": "resident", "actor": "offload",
    }  # fmt: skip


def test_what_a_recipe_has_against_a_plan_names_the_plan(tmp_path):
    parts = "rollout: {devices: 0}, reward: {devices: 0}, actor: {devices: 0-1}"
    with pytest.raises(ConfigError, match=r"cluster\.plan \(command line\): places 2 actor"):
        reasoning_support.small_config(
            tmp_path, "cluster.cpu_devices_per_node=2", f"cluster.plan={{components: {{{parts}}}}}"
        )
