import pytest

from rlinf.flow.plan import ComponentPlan, Plan


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
