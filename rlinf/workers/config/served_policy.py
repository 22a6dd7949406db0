"""A policy behind an action server that takes the place of a run's own in an evaluation."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import SecretStr

from rlinf.errors import ConfigError
from rlinf.flow.placed_config import PlacedConfig
from rlinf.models.config import ModelConfig
from rlinf.serving.remote import RemoteConfig, most_rows
from rlinf.workers.config.acting import EvaluatedConfig


@dataclass(frozen=True)
class Served:
    """A config with a server as its policy, what that is called, also in names of files, and its
    weight version."""

    config: PlacedConfig
    name: str
    stem: str
    version: int


@dataclass(frozen=True)
class Server:
    """An action server that a run is evaluated through.

    Args:
        url: ``ws://HOST:PORT``.
        token: What it asks for.
    """

    url: str
    token: str | None = None

    def in_place(self, config: PlacedConfig) -> Served:
        """A config with the server as its policy.

        Raises:
            ConfigError: The run has no policy for actions, or the server draws actions where the
                mode is to be evaluated, or the other way round, or a forward pass is larger than
                a request.
            ServerError: The server cannot be reached.
        """
        model = getattr(config, "model", None)
        if not isinstance(model, ModelConfig):
            raise ConfigError("--server: only policies for actions are served; leave it out")
        token = None if self.token is None else SecretStr(self.token)
        remote = RemoteConfig(num_action_chunks=model.num_action_chunks, url=self.url, token=token)
        with remote.connect() as client:
            told = client.metadata
        by_mode = told.get("deterministic", True)
        if isinstance(config, EvaluatedConfig) and by_mode != config.evaluation.deterministic:
            acts, other = ("acts by the mode of its policy", "--drawn") if by_mode else (
                "draws actions", "--mode")  # fmt: skip
            raise ConfigError(
                f"the server {acts}; legal: {str(by_mode).lower()}, or a server with {other}",
                key="evaluation.deterministic",
            )
        if isinstance(config, EvaluatedConfig):
            _require_whole_passes(config, most_rows(told["observations"]))
        name, version = f"{told['policy']} step {told['version']} at {self.url}", told["version"]
        remote = remote.model_copy(update={"version": version})
        stem = re.sub(r"[^\w.-]+", "_", str(told["policy"]))[:80]
        return Served(config.model_copy(update={"model": remote}), name, stem, int(version))


def _require_whole_passes(config: EvaluatedConfig, most: int) -> None:
    """Refuse a run whose forward passes have more rows than travel in one request."""
    parts, count, block = config.sub_batches, config.evaluation.num_envs, config.rollout.block_size
    rows = count // parts if block is None else block
    if rows <= most:
        return
    why = f"a forward pass of {rows} rows is a request, and a server takes {most} of these at once"
    if block is not None:
        raise ConfigError(f"{why}; nearest: {most}", key="rollout.block_size")
    unit = parts * config.evaluation_shares.unit
    raise ConfigError(
        f"{why}; nearest: {max(unit, most * parts // unit * unit)}", key="evaluation.num_envs"
    )
