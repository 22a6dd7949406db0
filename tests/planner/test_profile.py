import pytest

from rlinf.errors import ConfigError
from rlinf.planner.profile import (
    ComponentProfile,
    Fingerprints,
    Measurement,
    Profile,
    ScalingLaw,
)

PROFILE = Profile(
    hardware="8x H100",
    model="1.5B",
    config="abc",
    components={
        "rollout": ComponentProfile(
            measurements=(
                Measurement(items=512, devices=8, seconds=266.08, peak_bytes=7, origin="table"),
            ),
            onload_seconds=1.5,
            concurrent=True,
            scaling=ScalingLaw(lowest=1, highest=1024, origin="assumed"),
        )
    },
)


def test_a_profile_survives_being_saved_and_loaded(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == PROFILE


def test_a_profile_of_something_else_says_what_differs():
    here = Fingerprints(hardware="8x H100", model="1.5B", config="abc")
    assert here.differences(PROFILE) == ()
    here = Fingerprints(hardware="8x A100", model="1.5B", config="xyz")
    assert here.differences(PROFILE) == (
        "hardware is '8x A100', the profile was measured with '8x H100'",
        "config is 'xyz', the profile was measured with 'abc'",
    )
    keys = {"model.type": "mlp", "actor.update_epoch": 4}
    known = PROFILE.model_copy(update={"settings": keys})
    other = here.model_copy(
        update={"hardware": "8x H100", "settings": {**keys, "actor.update_epoch": 1}}
    )
    assert other.differences(known) == ("actor.update_epoch is 1, the profile was measured with 4",)


MACHINE = "AMD EPYC 7763 64-Core Processor, 128 cores, 1007 GiB, 8 devices, torch 2.13.0+cpu"


@pytest.mark.parametrize(
    ("here", "there", "told"),
    [
        ("mujoco 3.9.0", "mujoco 3.3.1", "is 'mujoco 3.9.0', the profile was measured with 'muj"),
        ("4x NVIDIA", "8x NVIDIA, a 1", "is '4x NVIDIA', the profile was measured with '8x NVI"),
        ("x, mujoco 3.9.0", "x", "is 'mujoco 3.9.0', the profile was measured without"),
        ("x", "x, mujoco 3.3.1", "is without 'mujoco 3.3.1', the profile was measured with it"),
    ],
)
def test_of_another_machine_only_what_differs_is_said(here, there, told):
    own = Fingerprints(hardware=f"{MACHINE}, {here}", model="1.5B", config="abc")
    other = PROFILE.model_copy(update={"hardware": f"{MACHINE}, {there}"})
    [difference] = own.differences(other)
    assert difference.startswith(f"hardware {told}")
    assert "AMD" not in difference


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "profile '.*': file: Invalid JSON"),
        (b"\xff\xfe\x00", "profile '.*': file: Invalid JSON"),
        (b'{"hardware": "x\xff"}', "profile '.*': file: Invalid JSON"),
        (b'{"hardware": "x", "model": "x", "config": "x"}', "components: Field required"),
    ],
)
def test_what_is_not_a_profile_is_refused(tmp_path, content, message):
    (tmp_path / "profile.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Profile.load(tmp_path / "profile.json")


def test_a_missing_profile_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Profile.load(tmp_path / "none.json")
