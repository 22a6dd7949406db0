from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlinf.envs.base import INSTRUCTION_SHAPE
from rlinf.envs.config import EnvConfig
from rlinf.envs.gymnasium_env import GymnasiumEnv, GymnasiumOptions
from rlinf.envs.recording import record_episodes
from rlinf.envs.results import FaultReason
from rlinf.envs.spec import EnvSpec, spec_of
from rlinf.envs.supervised.checks import EnvSideFault, checked_reward, guarded
from rlinf.envs.supervised.vector import SupervisedVectorEnv
from rlinf.errors import ConfigError


class Odd(gymnasium.Env):
    """Whatever spaces it is given."""

    def __init__(self, observations, actions, render_mode=None):
        self.observation_space, self.action_space = observations, actions

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 1.0, False, False, {"is_success": True}


@pytest.fixture(autouse=True)
def odd():
    gymnasium.register("Odd-v0", entry_point=Odd)
    yield
    gymnasium.registry.pop("Odd-v0")


def build(observations, actions, **options) -> GymnasiumEnv:
    kwargs = {"observations": observations, "actions": actions}
    return GymnasiumEnv(GymnasiumOptions(id="Odd-v0", kwargs=kwargs, render_mode=None, **options))


IMAGE = spaces.Box(0, 255, (8, 6, 3), np.uint8)
ONE = spaces.Discrete(2)
PLAIN = spaces.Box(-1, 1, (3,), np.float64)


@pytest.mark.parametrize(
    ("observations", "key", "shape", "dtype"),
    [
        (PLAIN, "states", (3,), "float32"),
        (spaces.Box(-1, 1, (2, 3), np.float32), "states", (6,), "float32"),
        (spaces.Discrete(5), "states", (5,), "float32"),
        (spaces.Dict({"a": PLAIN, "b": spaces.Discrete(2)}), "states", (5,), "float32"),
        (IMAGE, "main_images", (8, 6, 3), "uint8"),
    ],
)
def test_observations(observations, key, shape, dtype):
    env = build(observations, spaces.Box(-1, 1, (2,), np.float32))
    spec = spec_of(env, 10)
    assert spec.observation_shapes == {key: shape}
    assert spec.observation_dtypes == {key: dtype}
    for observation in (env.reset(seed=0)[0], env.step(np.zeros(2, np.float32))[0]):
        assert (observation[key].shape, observation[key].dtype) == (shape, dtype)


def test_continuous_actions_of_any_shape_arrive_in_that_shape():
    env = build(PLAIN, spaces.Box(-3.0, 4.0, (2, 2), np.float32))
    spec = spec_of(env, 10)
    assert (spec.action_kind, spec.action_dim, spec.choices) == ("continuous", 4, None)
    assert (spec.action_low, spec.action_high) == ((-3.0,) * 4, (4.0,) * 4)
    env.reset(seed=0)
    env.step(np.ones(4, np.float32))


def test_actions_stay_in_a_box_of_other_numbers():
    """0.1 of 32 bits is more than 0.1 of 64."""
    for low, high in ((-0.1, 0.1), (np.array([-0.1, 0.7]), np.array([0.3, 1.1]))):
        env = build(PLAIN, spaces.Box(low, high, (2,), np.float64))
        env.reset(seed=0)
        for action in (env.action_space.low, env.action_space.high):
            env.step(action)  # which asserts that it lies within


MIXED = spaces.Dict({"a": spaces.Box(-1, 1, (1,)), "b": spaces.Box(-1, 1, (3,))})


@pytest.mark.parametrize(
    ("space", "shown", "message"),
    [
        (spaces.Box(0, 10, (5,), np.int64), np.full(5, 0.5), "is array.*0.5.* not of the space"),
        (PLAIN, np.zeros((1, 3)), "not of the space"),
        (PLAIN, None, "is None, not of the space"),
        (spaces.Discrete(4), -1, "is -1, not of the space Discrete"),
        (MIXED, {"a": np.zeros(3), "b": np.zeros(1)}, "observation `a` is"),
        (MIXED, {"a": np.zeros(1)}, r"has \['a'\], its space \['a', 'b'\]"),
        (MIXED, {"a": np.zeros(1), "b": np.zeros(3), "c": 0}, r"has \['a', 'b', 'c'\], its"),
        (MIXED, np.zeros(4), "has <class 'numpy.ndarray'>, its space"),
    ],
)
def test_an_observation_of_another_space_is_malformed(space, shown, message, monkeypatch):
    env = build(space, spaces.Discrete(2))
    env.reset(seed=0)
    monkeypatch.setattr(Odd, "step", lambda self, action: (shown, 1.0, False, False, {}))
    with pytest.raises(EnvSideFault, match=message) as fault:
        guarded(env.step, 0)
    assert fault.value.reason is FaultReason.MALFORMED


@pytest.mark.parametrize("said", [float("nan"), "no", 0.3, 2, np.zeros(2), [[1], [1, 2]]])
def test_a_success_that_is_neither_true_nor_false_is_malformed(said, monkeypatch):
    env = build(PLAIN, spaces.Discrete(2), success_key="is_success")
    fine = [(np.bool_(True), True), (0, False), (np.array(1.0), True), (np.array([True]), True),
            (None, False)]  # fmt: skip
    for info, expected in [*fine, (said, None)]:
        env.reset(seed=0)
        monkeypatch.setattr(
            Odd, "step", lambda *_, info=info: (np.zeros(3), 1.0, True, False, {"is_success": info})
        )
        if expected is None:
            with pytest.raises(
                EnvSideFault, match=r"info\['is_success'\] is .*, not true or false"
            ):
                env.step(0)
        else:
            assert env.step(0)[4]["success"] is expected


@pytest.mark.parametrize("reward", [np.array([1.0]), np.zeros(2), None, "1"])
@pytest.mark.parametrize("options", [{}, {"success_return": 1.0}])
def test_a_reward_that_is_no_number_is_left_to_who_reads_it(reward, options, monkeypatch):
    env = build(PLAIN, spaces.Discrete(2), **options)
    env.reset(seed=0)
    monkeypatch.setattr(Odd, "step", lambda self, _: (np.zeros(3), reward, False, False, {}))
    with pytest.raises(EnvSideFault, match="the reward is not a number"):
        checked_reward(env.step(0)[1])


def test_discrete_actions_arrive_as_their_number():
    env = build(PLAIN, spaces.Discrete(3, start=5))
    spec = spec_of(env, 10)
    assert (spec.action_kind, spec.action_dim, spec.choices) == ("discrete", 1, (3,))
    assert spec.own_limits == ([5.0], [7.0])
    env.reset(seed=0)
    env.step(2)


@pytest.mark.parametrize(
    ("actions", "choices", "given"),
    [
        (spaces.MultiDiscrete([2, 4], start=[3, -1]), (2, 4), [1, 3]),
        (spaces.MultiDiscrete([[2, 4], [3, 1]]), (2, 4, 3, 1), [1, 3, 2, 0]),
        (spaces.MultiDiscrete([3]), (3,), 2),
        (spaces.MultiBinary((2, 2)), (2, 2, 2, 2), [1, 0, 1, 1]),
        (spaces.Box(np.array([-1, 2]), np.array([1, 5]), dtype=np.int64), (3, 4), [2, 3]),
        (spaces.Box(3, 255, (1,), np.uint8), (253,), 252),
    ],
)
def test_several_choices_arrive_as_the_space_has_them(actions, choices, given):
    env = build(PLAIN, actions)
    spec = spec_of(env, 10)
    assert (spec.action_kind, spec.action_dim, spec.choices) == ("discrete", len(choices), choices)
    called = spec.in_units(np.array(given, np.float32).reshape(-1))
    assert actions.contains(called.reshape(actions.shape).astype(actions.dtype))
    np.testing.assert_array_equal(spec.of_units(called), given)
    assert EnvSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    env.reset(seed=0)
    env.step(given if isinstance(given, int) else np.array(given, np.float32))


def test_success_by_info_or_by_return():
    actions = spaces.Discrete(2)
    for options, expected in (
        ({"success_key": "is_success"}, [True, True, True]),
        ({"success_return": 2.0}, [False, True, True]),
    ):
        env = build(PLAIN, actions, **options)
        for _ in range(2):
            env.reset(seed=0)
            assert [env.step(0)[4]["success"] for _ in range(3)] == expected


@pytest.mark.parametrize(
    ("observations", "actions", "message"),
    [
        (PLAIN, spaces.Tuple([spaces.Discrete(2)]), "Box, Discrete, MultiDiscrete and MultiBinary"),
        (PLAIN, spaces.Box(0, 5000, (2,), np.int32), "5001 values; nearest: at most 1024"),
        (spaces.Sequence(PLAIN), spaces.Discrete(2), "varying size"),
    ],
)
def test_what_cannot_be_handled_is_refused(observations, actions, message):
    with pytest.raises(ConfigError, match=message):
        build(observations, actions)


def test_an_unknown_id_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match=r"(?s)^options\.id: .*Pendlum.*Did you mean"):
        GymnasiumEnv.check(GymnasiumOptions(id="Pendlum-v1"), 100)
    for module in ("no_such_module", "no_such_package.module"):
        with pytest.raises(ConfigError, match=r"options\.id: .*no_such"):
            GymnasiumEnv.check(GymnasiumOptions(id=f"{module}:Name-v0"), 100)


def test_pictures_that_end_in_the_same_key_are_told_apart():
    camera = spaces.Dict({"rgb": IMAGE})
    observations = spaces.Dict({"left": camera, "right": camera, "top": IMAGE})
    env = build(observations, spaces.Discrete(2))
    shown, _ = env.reset(seed=0)
    assert shown.keys() == {"images.left_rgb", "images.right_rgb", "images.top"}
    assert (shown["images.left_rgb"] != shown["images.right_rgb"]).any()


def test_marks_in_the_key_of_a_picture_become_underscores():
    env = build(spaces.Dict({"cam/front": IMAGE, "a.b": IMAGE}), spaces.Discrete(2))
    assert set(env.reset(seed=0)[0]) == {"images.cam_front", "images.a_b"}
    with pytest.raises(ConfigError, match=r"differ in marks alone: a\.b, a/b; rename"):
        build(spaces.Dict({"a.b": IMAGE, "a/b": IMAGE}), spaces.Discrete(2))


def test_an_argument_that_the_environment_does_not_take_is_refused():
    options = GymnasiumOptions(id="CartPole-v1", kwargs={"gravty": 1.0})
    with pytest.raises(ConfigError, match="gravty") as refused:
        GymnasiumEnv(options)
    assert refused.value.key == "options.kwargs"


class Ends(Odd):
    """Its first step is the last."""

    def step(self, action):
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, True, truncated, info


def test_the_order_within_the_states_is_told():
    box, picture = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(0, 255, (8, 8, 3), np.uint8)
    shown = spaces.Dict({"tcp": box, "arm": spaces.Dict({"on": spaces.Discrete(3)}), "a": picture})
    spec = spec_of(build(shown, spaces.Discrete(2)), 5)
    assert spec.state_parts == (("arm.on", 3), ("tcp", 2))
    assert EnvSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert spec_of(build(box, spaces.Discrete(2)), 5).state_parts == ()


def test_a_mistyped_key_of_success_is_found_at_the_end_of_an_episode():
    gymnasium.register("Ends-v0", entry_point=lambda **given: Ends(PLAIN, spaces.Discrete(2)))
    try:
        env = GymnasiumEnv(GymnasiumOptions(id="Ends-v0", success_key="is_succes"))
        env.reset(seed=0)
        with pytest.raises(ConfigError, match="has no `is_succes`; nearest: is_success"):
            env.step(0)
    finally:
        gymnasium.registry.pop("Ends-v0")


def test_it_is_also_found_where_the_time_limit_of_a_run_ends_episodes():
    env = build(PLAIN, spaces.Discrete(2), success_key="is_sucess")
    env.reset(seed=0)
    env.step(0)
    with pytest.raises(ConfigError, match="has no `is_sucess`; nearest: is_success"):
        env.reset(seed=1)


def test_a_key_of_success_unlike_all_others_is_remarked_on_once(caplog):
    env = build(PLAIN, spaces.Discrete(2), success_key="solved")
    env.reset(seed=0)
    assert not env.remark
    env.step(0)
    env.reset(seed=1)
    assert "had `solved` in its info, which has is_success: unless it comes" in env.remark
    config = EnvConfig(
        type="gymnasium",
        options={"id": "Pendulum-v1", "success_key": "solved"},
        max_episode_steps=3,
        processes=2,
    )
    with SupervisedVectorEnv(config, num_envs=4, seed=0) as vector:
        vector.reset()
        for _ in range(4):
            vector.chunk_step(np.zeros((4, 3, 1), np.float32))
    assert caplog.text.count("of Pendulum-v1 had `solved` in its info, which has nothing") == 1


def test_a_person_who_takes_over_is_remarked_on_once_even_in_the_only_episode(caplog):
    config = EnvConfig(
        type="gymnasium",
        options={"id": "tests.runners.odd_envs:TakenOver-v0"},
        max_episode_steps=2,
        processes=1,
    )
    record_episodes(
        config, lambda spec: lambda seen: np.ones((2, 1, 2)), [(0, 0), (1, 1)], num_envs=2
    )
    (said,) = caplog.messages
    assert "had `intervene_action` in its info: interventions are not supported yet" in said


@pytest.mark.parametrize(
    ("shape", "as_einsum", "wanted"),
    [
        ((20, 30), "hw", "hw"),
        ((20, 30, 1), "hw1", "hw"),
        ((1, 20, 30), "1hw", "hw"),
        ((20, 30, 3), "hwc", "hwc"),
        ((3, 20, 30), "chw", "hwc"),
        ((4, 20, 30), "nhw", "nhw"),
        ((20, 30, 4), "hwn", "nhw"),
        ((2, 20, 30, 3), "nhwc", "nhwc"),
        ((2, 3, 20, 30), "nchw", "nhwc"),
        ((2, 20, 30, 1), "nhw1", "nhw"),
        ((2, 1, 20, 30), "n1hw", "nhw"),
    ],
)
def test_pictures_of_every_form_are_read_alike(shape, as_einsum, wanted):
    shown = spaces.Dict({"camera": spaces.Box(0, 255, shape, np.uint8)})
    env = build(shown, spaces.Discrete(2))
    found, _ = env.reset(seed=3)
    shown.seed(3)
    expected = np.einsum(f"{as_einsum.replace('1', 'o')}->{wanted}", shown.sample()["camera"])
    if "c" not in wanted:  # grey, which is equal in all three colours
        expected = np.stack([expected] * 3, axis=-1)
    assert np.array_equal(found["main_images"], expected)
    assert spec_of(env, 10).observation_shapes == {"main_images": expected.shape}


@pytest.mark.parametrize("shape", [(84, 84, 84), (4, 84, 84, 84), (20, 84, 84, 5)])
def test_bytes_in_rows_and_columns_of_no_known_form_are_refused(shape):
    with pytest.raises(ConfigError, match=r"the observation of Odd-v0 is uint8 .*; pictures are"):
        build(spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(2))


def test_a_picture_of_another_shape_than_its_space_is_a_fault_of_the_environment():
    class Wide(Odd):
        def reset(self, *, seed=None, options=None):
            return np.zeros((20, 31), np.uint8), {}

    gymnasium.register("Wide-v0", entry_point=Wide)
    try:
        kwargs = {"observations": spaces.Box(0, 255, (20, 30), np.uint8), "actions": ONE}
        env = GymnasiumEnv(GymnasiumOptions(id="Wide-v0", kwargs=kwargs, render_mode=None))
        with pytest.raises(EnvSideFault, match=r"is uint8\[20, 31\], not uint8\[20, 30\]"):
            env.reset(seed=0)
    finally:
        gymnasium.registry.pop("Wide-v0")


@pytest.mark.parametrize(
    ("high", "dtype", "shape"),
    [(1, np.float32, (20, 30, 3)), (255, np.float64, (84, 84)), (255, np.int32, (4, 84, 84))],
)
def test_pictures_that_are_no_bytes_are_refused(high, dtype, shape):
    shown = spaces.Dict({"camera": spaces.Box(0, high, shape, dtype), "arm": ONE})
    with pytest.raises(ConfigError, match=rf"`camera` of Odd-v0 is .* from 0 to {high}.* uint8"):
        build(shown, spaces.Discrete(2))


@pytest.mark.parametrize(
    ("high", "dtype", "shape"),
    [(65535, np.uint16, (64, 48)), (10, np.float32, (64, 48, 1)), (np.inf, float, (1, 64, 48))],
)
def test_depths_in_rows_and_columns_are_refused_whatever_their_unit(high, dtype, shape):
    shown = spaces.Dict({"depth": spaces.Box(0, high, shape, dtype), "arm": ONE})
    with pytest.raises(ConfigError, match=rf"`depth` of Odd-v0 is .* to {high}.*FilterObservation"):
        build(shown, spaces.Discrete(2))


@pytest.mark.parametrize(("low", "shape"), [(-np.inf, (20, 30, 3)), (0, (8, 9)), (0, (600,))])
def test_other_tables_of_floats_are_states(low, shape):
    env = build(spaces.Box(low, 1, shape, np.float32), spaces.Discrete(2))
    assert spec_of(env, 10).observation_shapes == {"states": (int(np.prod(shape)),)}


def test_a_small_board_of_bytes_is_states():
    env = build(spaces.Box(0, 2, (9, 9), np.uint8), spaces.Discrete(2))
    assert spec_of(env, 10).observation_shapes == {"states": (81,)}


class Level(Odd):
    """Its reset needs to be told a level."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {"level": options["level"]}


def test_options_of_a_reset_are_given():
    gymnasium.register("Level-v0", entry_point=lambda **given: Level(PLAIN, spaces.Discrete(2)))
    try:
        options = GymnasiumOptions(id="Level-v0", reset_options={"level": 3}, render_mode=None)
        assert GymnasiumEnv(options).reset(seed=0)[1] == {"level": 3}
    finally:
        gymnasium.registry.pop("Level-v0")


def test_success_is_said_by_one_option():
    options = GymnasiumOptions(id="CartPole-v1", success_key="is_success", success_return=2.0)
    with pytest.raises(ConfigError, match="one of success_key and success_return"):
        GymnasiumEnv.check(options, 10)


def test_an_environment_that_draws_no_pictures_says_so():
    env = GymnasiumEnv(GymnasiumOptions(id="CartPole-v1", render_mode=None))
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match=r"render_mode: null.* draws no pictures.*rgb_array"):
        env.render()


class BeforeGymnasium(Odd):
    """It returns what environments of gym did."""

    told = ()

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        return (observation, *self.told)

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, {}


def test_an_environment_that_returns_something_else_is_told_what_to_return(monkeypatch):
    gymnasium.register(
        "Before-v0", entry_point=lambda **given: BeforeGymnasium(PLAIN, spaces.Discrete(2))
    )
    try:
        env = GymnasiumEnv(GymnasiumOptions(id="Before-v0", render_mode=None))
        with pytest.raises(ValueError, match=r"reset has to return \(observation, info\): "):
            env.reset(seed=0)
        monkeypatch.setattr(BeforeGymnasium, "told", ({},))
        env.reset(seed=0)
        with pytest.raises(ValueError, match=r"step has to return \(observation, reward, term"):
            env.step(0)
    finally:
        gymnasium.registry.pop("Before-v0")


class BeforeGymnasiumInTwo(Odd):
    """Its reset returns an observation of two entries alone."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (spaces.Dict({"place": PLAIN, "goal": PLAIN}), "dict"),
        (spaces.Box(-1, 1, (2,), np.float32), "ndarray"),
    ],
)
def test_an_observation_of_two_entries_is_not_taken_for_observation_and_info(space, kind):
    made = lambda **given: BeforeGymnasiumInTwo(space, spaces.Discrete(2))  # noqa: E731
    gymnasium.register("BeforeInTwo-v0", entry_point=made)
    try:
        env = GymnasiumEnv(GymnasiumOptions(id="BeforeInTwo-v0", render_mode=None))
        with pytest.raises(ValueError, match=rf"reset has to return \(observation.*one {kind}"):
            env.reset(seed=0)
    finally:
        gymnasium.registry.pop("BeforeInTwo-v0")


class Unregistered(Odd):
    """Known to nobody."""


def test_classes_that_gymnasium_cannot_make_are_told_in_a_line():
    name = f"{__name__}:Unregistered"
    with pytest.raises(
        ConfigError, match=r"has a class of this name.*gymnasium\.register\(id='Unr"
    ):
        GymnasiumEnv(GymnasiumOptions(id=name, render_mode=None))
    for entry_point, told in (
        (type("Bare", (gymnasium.Env,), {}), "Made-v0 has no observation_space"),
        (type("Foreign", (), {}), "must inherit from the gymnasium.Env class"),
    ):
        gymnasium.register("Made-v0", entry_point=entry_point)
        try:
            with pytest.raises(ConfigError, match=told) as refused:
                GymnasiumEnv(GymnasiumOptions(id="Made-v0", render_mode=None))
            assert "\n" not in str(refused.value)
        finally:
            gymnasium.registry.pop("Made-v0")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import gymnasium, no_such_package\n", "ModuleNotFoundError: No module named 'no_"),
        ("def broken(:\n", "SyntaxError: "),
        ("raise RuntimeError('no licence')\n", r"RuntimeError: no licence \(.*_module\.py line"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_in_a_line(code, why, tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"own_module cannot be imported: {why}") as refused:
        GymnasiumEnv(GymnasiumOptions(id="own_module:Own-v0", render_mode=None))
    assert "\n" not in str(refused.value)


def test_a_class_without_a_method_that_renders_says_so():
    env = GymnasiumEnv(
        GymnasiumOptions(id="Odd-v0", kwargs={"observations": PLAIN, "actions": spaces.Discrete(2)})
    )
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="Odd-v0 draws no pictures; nearest: no video"):
        env.render()


class WithoutRenderMode(Odd):
    """It is made with no argument of that name."""

    def __init__(self):
        super().__init__(spaces.Box(-1.0, 1.0, (2,)), spaces.Box(-1.0, 1.0, (1,)))


@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
def test_an_environment_that_takes_no_render_mode(render_mode):
    gymnasium.register("Without-v0", entry_point=WithoutRenderMode)
    try:
        env = GymnasiumEnv(GymnasiumOptions(id="Without-v0", render_mode=render_mode))
        assert env.reset(seed=0)[0]["states"].shape == (2,)
    finally:
        gymnasium.registry.pop("Without-v0")


class Sized(Odd):
    """It needs arguments, and may fail within."""

    def __init__(self, size, *, colour=None, render_mode=None):
        self.need(colour)

    def need(self, colour, shape):
        """Called with too few arguments."""


def test_arguments_that_the_class_needs_are_named():
    gymnasium.register("Sized-v0", entry_point=Sized)
    try:
        with pytest.raises(
            ConfigError, match=r"argument: 'size'; nearest: \{size: …\}$"
        ) as refused:
            GymnasiumEnv(GymnasiumOptions(id="Sized-v0"))
        assert refused.value.key == "options.kwargs"
        with pytest.raises(TypeError, match="'shape'"):  # its own failure, not that of a recipe
            GymnasiumEnv(GymnasiumOptions(id="Sized-v0", kwargs={"size": 3}))
    finally:
        gymnasium.registry.pop("Sized-v0")


def test_nothing_is_said_of_a_render_mode_that_nobody_asked_for(recwarn):
    kwargs = {"observations": PLAIN, "actions": ONE}
    GymnasiumEnv(GymnasiumOptions(id="Odd-v0", kwargs=kwargs))
    assert not [each for each in recwarn if "render_mode" in str(each.message)]
    GymnasiumEnv(GymnasiumOptions(id="Odd-v0", kwargs=kwargs, render_mode="human"))
    assert [each for each in recwarn if "render_mode='human'" in str(each.message)]


def test_render_mode_is_no_further_argument():
    options = GymnasiumOptions(id="CartPole-v1", kwargs={"render_mode": "human"})
    with pytest.raises(ConfigError, match=r"a key beside `kwargs`: options.render_mode"):
        GymnasiumEnv(options)


def test_a_text_is_the_instruction_and_the_frame_rate_that_of_the_environment():
    env = build(
        spaces.Dict({"arm": spaces.Box(-1, 1, (2,)), "told": spaces.Text(20)}), spaces.Discrete(2)
    )
    seen, _ = env.reset(seed=0)
    assert seen["states"].shape == (2,)
    assert seen["instruction"].shape == INSTRUCTION_SHAPE
    assert env.observation_space["instruction"].contains(seen["instruction"])
    rates = {"Pendulum-v1": 20.0, "CartPole-v1": 50.0, "MountainCar-v0": None}
    for name, rate in rates.items():
        assert GymnasiumEnv(GymnasiumOptions(id=name)).control_rate == rate
    dot = GymnasiumOptions(id="tests.runners.pictures:Dot-v0")
    assert GymnasiumEnv(dot).control_rate == 10.0
    two = {"told": spaces.Text(20), "said": spaces.Text(20)}
    with pytest.raises(ConfigError, match=r"several texts \((told, said|said, told)\)"):
        build(spaces.Dict(two), spaces.Discrete(2))


@pytest.mark.parametrize("options", [{}, {"success_key": "is_success"}, {"success_return": 1.0}])
def test_an_info_that_is_no_mapping_is_malformed(options, monkeypatch):
    env = build(PLAIN, spaces.Discrete(2), **options)
    env.reset(seed=0)
    monkeypatch.setattr(
        env._env.unwrapped, "step", lambda action: (PLAIN.sample(), 0.0, False, False, None)
    )
    with pytest.raises(EnvSideFault, match="step returns None as info, no mapping") as fault:
        env.step(np.zeros(1, np.float32))
    assert fault.value.reason is FaultReason.MALFORMED


@pytest.mark.parametrize(
    ("options", "repeats"),
    [
        ({}, {"deterministic": False, "replayable": False}),
        ({"deterministic": True}, {"deterministic": True, "replayable": True}),
        ({"replayable": True}, {"deterministic": False, "replayable": True}),
    ],
)
def test_an_environment_registered_as_nondeterministic_repeats_nothing(tmp_path, options, repeats):
    moves = tmp_path / "moves"
    arm = {"id": "tests.runners.odd_envs:Arm-v0", "kwargs": {"moves": str(moves)}, **options}
    config = EnvConfig(type="gymnasium", options=arm, max_episode_steps=50, max_fault_rate=1.0)

    def act(vector):
        return vector.chunk_step(np.zeros((1, 5, vector.env_spec.action_dim), np.float32))

    with SupervisedVectorEnv(config, num_envs=1, seed=0) as vector:
        assert vector.repeats == repeats
        vector.reset()
        act(vector)
        state = vector.state_dict()
    moves.unlink()
    with SupervisedVectorEnv(config, num_envs=1, seed=0) as vector:
        vector.load_state_dict(state)
        assert ("move" in moves.read_text()) == repeats["replayable"]
        (fault,) = act(vector).faults
    reason = FaultReason.MALFORMED if repeats["replayable"] else FaultReason.NOT_REPLAYABLE
    assert fault.reason is reason
