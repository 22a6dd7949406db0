"""A policy that is behind a server, as evaluation plays with it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from pydantic import SecretStr
from torch import Tensor

from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.models.config import ModelConfig
from rlinf.models.policy import ActionEvaluation, ActionSample, Policy
from rlinf.serving.client import ActionClient, ServerError
from rlinf.serving.requests import BATCH, MOST_ROWS
from rlinf.serving.wire import LARGEST_MESSAGE, pack

_TOLD = {"policy", "version", "chunk", "action_dim", "action_kind", "action_low", "action_high",
         "observations", "tasks"}  # fmt: skip

_LONGEST_ANSWER = 600.0
"""Seconds of a forward pass, in which all envs are rows; on CPUs that may be minutes."""


class RemoteConfig(ModelConfig):
    """Where the policy is; takes the place of the model section of a run that is evaluated."""

    implementation = "rlinf.serving.remote:RemotePolicy"
    type: Literal["remote"] = "remote"
    url: str
    token: SecretStr | None = None
    version: int | None = None
    """Of the weights that are evaluated; None: whichever the server has."""

    def connect(self) -> ActionClient:
        """A connection of its own; ConfigError where others than ``rlinf serve policy`` answer."""
        token = None if self.token is None else self.token.get_secret_value()
        client = ActionClient(self.url, token, timeout=_LONGEST_ANSWER)
        told: Any = client.metadata
        if not (isinstance(told, dict) and told.keys() >= _TOLD):
            client.close()
            raise ConfigError(
                f"the server at {self.url} does not say what its policy reads and does, so that it "
                "cannot be evaluated; nearest: a run behind `rlinf serve policy`"
            )
        return client


def most_rows(observations: Mapping[str, Any]) -> int:
    """How many rows a forward pass may have to travel as one request, at least one.

    Args:
        observations: ``shape`` and ``dtype`` by name, as the metadata of a server has them.
    """
    row = {name: np.zeros(each["shape"], each["dtype"]) for name, each in observations.items()}
    # An array is never shorter than a scalar of its kind, whose length depends on its value.
    around = len(pack({BATCH: [None] * MOST_ROWS})) - MOST_ROWS
    return max(1, min(MOST_ROWS, (LARGEST_MESSAGE - 1 - around) // len(pack(row))))


class RemotePolicy(Policy):
    """Asks a server, one request for each forward pass: its rows share one there as well, so that
    answers by its mode are those of the policy in this process, to the bit, on an equal device.

    Raises:
        ConfigError: The server has a policy for other observations, actions or chunks.
    """

    def __init__(
        self, config: RemoteConfig, env_spec: EnvSpec, *, value_dim: int, seed: int
    ) -> None:
        super().__init__()
        del value_dim, seed  # it has no values, and its weights are elsewhere
        self._config, self._client, self._spec = config, config.connect(), env_spec
        weakref.finalize(self, self._client.close)
        self.chunk, self.action_dim, self.value_dim = (
            config.num_action_chunks, env_spec.action_dim, 0
        )  # fmt: skip
        told = self._client.metadata
        # What the policy does not act on, such as the states that only its critic sees, stays here.
        self._asked = tuple(told["observations"])
        own = {
            "chunk": self.chunk,
            "action_dim": self.action_dim,
            "action_kind": env_spec.action_kind,
            "observations": {
                name: {"shape": list(shape), "dtype": env_spec.observation_dtypes[name]}
                for name, shape in env_spec.showing(self._asked).observation_shapes.items()
            },
            "tasks": list(env_spec.task_descriptions),
        }
        own["action_low"], own["action_high"] = env_spec.own_limits
        if told.get("state_parts") and env_spec.state_parts:  # a server of before says none
            own["state_parts"] = [list(part) for part in env_spec.state_parts]
        for name, wanted in own.items():
            if told[name] != wanted:
                raise ConfigError(f"the policy at {config.url} has {name} {told[name]}, the run "
                                  f"{wanted}; serve a policy of the same environment")  # fmt: skip

    def sample(self, observations: Mapping[str, Tensor], noise: Any) -> ActionSample:
        """What the server answers, which draws itself, and tells no log-probs (NaN)."""
        del noise
        arrays = {name: observations[name].cpu().numpy() for name in self._asked}
        rows = len(next(iter(arrays.values())))
        batch = [{name: array[row] for name, array in arrays.items()} for row in range(rows)]
        answer, wanted = self._client.infer({BATCH: batch}), self._config.version
        if wanted not in (None, answer["version"]):
            raise ServerError(
                f"the server at {self._config.url} went from the weights of step {wanted} to those "
                f"of step {answer['version']} in the evaluation; evaluate again, or serve the "
                "checkpoint, or without --follow"
            )
        actions = torch.from_numpy(self._spec.of_units(answer["actions"]).copy())
        return ActionSample(actions, torch.full_like(actions, torch.nan), {})

    def evaluate_actions(self, forward_inputs: Mapping[str, Tensor]) -> ActionEvaluation:
        """Not told."""
        self._refuse()

    def value(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Not told."""
        self._refuse()

    def update_normalizer(self, forward_inputs: Mapping[str, Tensor]) -> None:
        """Not possible."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TypeError("a policy behind a server is evaluated, not trained")

    def value_parameters(self) -> Iterator[torch.nn.Parameter]:
        """None."""
        return iter(())
