"""Environments that draw nothing, break, cannot be built, or tell what their process was told;
light, as every env process imports them."""

from __future__ import annotations

import fcntl
import os

import gymnasium
import numpy as np

from .pictures import Dot


class Unseen(Dot):
    """Its position alone; no picture of it can be drawn."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.observation_space = self.observation_space["position"]

    def render(self):
        raise RuntimeError("no graphics card was found")

    def _seen(self):
        return self._position.copy()


class Seen(Unseen):
    """Its position alone, at ten actions a second; pictures of it are videos alone."""

    def render(self):
        return Dot.render(self)


class Alone(Seen):
    """It opens a port that another one may not have open."""

    def __init__(self, port, render_mode=None):
        super().__init__(render_mode)
        self._port = open(port, "w")  # noqa: SIM115 - until it is closed
        try:
            fcntl.flock(self._port, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError("the port is busy") from None

    def close(self):
        self._port.close()


class Breaks(Unseen):
    """It fails now and then, and takes actions far from 0."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.action_space = gymnasium.spaces.Box(100.0, 200.0, (2,), np.float32)

    def step(self, action):
        if self.np_random.random() < 0.02:
            raise RuntimeError("the gripper broke")
        return super().step((action - np.float32(150.0)) / np.float32(50.0))


class Narrow(Unseen):
    """Its first action is narrow, within ± a bound; its position is called by a name."""

    def __init__(self, render_mode=None, bound=0.05, called="place"):
        super().__init__(render_mode)
        self._called, high = called, np.array([bound, 1.0], np.float32)
        self.action_space = gymnasium.spaces.Box(-high, high)
        speed = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        shown = {called: self.observation_space, "speed": speed}
        self.observation_space = gymnasium.spaces.Dict(shown)

    def _seen(self):
        return {self._called: super()._seen(), "speed": np.zeros(1, np.float32)}


class TakenOver(Unseen):
    """Somebody else acts in its place, and is told of."""

    def step(self, action):
        *rest, info = super().step(-action)
        return *rest, {**info, "intervene_action": -action}


class Unmade(Unseen):
    """Needs what is not there."""

    def __init__(self, render_mode=None):
        raise ImportError("libsimulator.so is missing")


class Arm(Unseen):
    """Never twice in the same place, as a real arm; writes down each reset and each move."""

    def __init__(self, moves, render_mode=None):
        super().__init__(render_mode)
        self._moves = moves

    def _wrote(self, what, found):
        with open(self._moves, "a") as moves:
            moves.write(f"{what}\n")
        noise = np.random.default_rng().uniform(-1e-3, 1e-3, 2).astype(np.float32)
        return (found[0] + noise, *found[1:])

    def reset(self, **given):
        return self._wrote("reset", super().reset(**given))

    def step(self, action):
        return self._wrote("move", super().step(action))


class Drawn(gymnasium.Env):
    """Pictures of a square, in which levels of brightness differ by chance, as a renderer may round
    them; or its place, which no seed decides."""

    def __init__(self, levels=1, moves=False, render_mode=None):
        self.observation_space = gymnasium.spaces.Box(0, 255, (48, 48, 3), np.uint8)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._levels, self._moves = levels, moves

    def _seen(self):
        chance = np.random.default_rng()
        across = chance.integers(0, 43) if self._moves else self._across
        picture = np.full((48, 48, 3), 100, np.uint8)
        picture[self._down : self._down + 4, across : across + 4] = 200
        return picture + chance.integers(0, self._levels + 1, picture.shape, np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._down, self._across = self.np_random.integers(0, 43, 2)
        return self._seen(), {}

    def step(self, action):
        return self._seen(), 0.0, False, False, {}


class Told(Unseen):
    """Every step earns what a variable says."""

    def step(self, action):
        seen, _, *rest = super().step(action)
        return seen, float(os.environ["RLINF_TEST_TOLD"]), *rest


class Strolls(gymnasium.Env):
    """It succeeds once what was done adds up to a goal: episodes end at different times. Far to the
    other side it has failed, and goes on. The n-th episode of a process raises on the way, where n
    is given."""

    begun = 0

    def __init__(self, render_mode=None, failing=None):
        self.observation_space = gymnasium.spaces.Box(-50.0, 50.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._failing = failing

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Strolls.begun += 1
        self._fails = Strolls.begun == self._failing
        self._steps, self._place, self._goal = 0, 0.0, self.np_random.uniform(1, 3)
        return self._seen(), {}

    def step(self, action):
        self._steps += 1
        if self._fails and self._steps == 3:
            raise RuntimeError("it stumbled")
        self._place += float(action[0])
        there = self._place > self._goal
        told = {"success": there, "fail": self._place < -2.0}
        return self._seen(), float(there), there, False, told

    def _seen(self):
        return np.array([self._place, self._goal], np.float32)


for entry in (Unseen, Seen, Alone, Breaks, Unmade, Told, Strolls, Narrow, TakenOver):
    gymnasium.register(f"{entry.__name__}-v0", entry_point=entry)
for entry in (Arm, Drawn):
    gymnasium.register(f"{entry.__name__}-v0", entry_point=entry, nondeterministic=True)


def remembers(render_mode=None):
    """One of gymnasium's own on MuJoCo, in a wrapper that keeps what was seen before."""
    reacher = gymnasium.make("Reacher-v5", render_mode=render_mode)
    return gymnasium.wrappers.FrameStackObservation(reacher, 2)


gymnasium.register("Remembers-v0", entry_point=remembers)
