"""``rlinf serve policy RUN|CHECKPOINT|RECIPE``."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlinf.cli.failure import Debug
from rlinf.cli.lasting_output import lasting
from rlinf.cli.run_paths import find_run_or_checkpoint, is_recipe
from rlinf.cli.screen import say
from rlinf.cli.train import INTERRUPTED, Moved, end_signals
from rlinf.errors import ConfigError, MissingPackageError
from rlinf.serving.server_address import require_listening

if TYPE_CHECKING:
    from rlinf.cli.tasks import AnyTask
    from rlinf.runners.embodied_evaluation import InitialPolicy

TOKEN_VARIABLE = "RLINF_SERVE_TOKEN"
_FOLLOW_SECONDS = 2.0

Renamed = Annotated[
    list[str] | None,
    typer.Option(
        metavar="THEIRS=OURS",
        help="A name that clients use, such as observation/image=main_images; nothing behind "
        "the sign leaves the entry out.",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Rows of every forward pass, filled up, so that answers do not depend on the "
        "batch to the last bit; default: rollout.block_size of the run.",
    ),
]

app = typer.Typer(no_args_is_help=True, help="Let others use what was trained.")


@app.callback()
def _options() -> None:
    """Let others use what was trained."""


@app.command("policy")
def policy(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|RECIPE",
            help="Whose policy acts; of a recipe the one that it begins with.",
        ),
    ],
    moved: Moved = None,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0: reached from other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    token: Annotated[
        str | None,
        typer.Option(
            envvar=TOKEN_VARIABLE, help="What clients must send; default: one is made and printed."
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Ask for none; only at a loopback address.")
    ] = False,
    key: Renamed = None,
    batch: Annotated[int, typer.Option(min=1, help="Observations of a batch, at most.")] = 8,
    wait_ms: Annotated[
        float,
        typer.Option(min=0, max=60_000, help="How long a batch waits for other clients, at most."),
    ] = 2.0,
    block_size: BlockSize = None,
    drawn: Annotated[
        bool | None,
        typer.Option(
            "--drawn/--mode",
            help="Draw actions, or act by the mode; default: as evaluation.deterministic says.",
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Take every newer checkpoint of the run.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="Of torch; default: the accelerator, where there is one.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a trained policy over WebSocket and HTTP, as clients of openpi expect it."""
    _check_token(token, no_token=no_token)
    keys = _renaming(key or [])
    recipe = is_recipe(source)
    path = None if recipe else find_run_or_checkpoint(source)
    require_serving("rlinf serve policy")
    require_listening(host, port)
    acting = _of_recipe(source, moved) if path is None else _of_run(source, path, moved, keys)
    if follow and (path is None or path.parent.name == "checkpoints"):
        raise ConfigError(
            f"--follow: {'what a recipe begins with' if recipe else 'a checkpoint'} does not "
            "change; give the run instead"
        )

    from rlinf.serving.server import ServerSettings

    settings = ServerSettings(
        host=host,
        port=port,
        token=None if no_token else token or secrets.token_urlsafe(24),
        rows=batch,
        wait=wait_ms / 1e3,
        follow=_FOLLOW_SECONDS if follow else None,
        keys=keys,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    _serve(acting, settings, block_size, device, made=token is None, drawn=drawn)


def _check_token(token: str | None, *, no_token: bool) -> None:
    if token is not None and no_token:
        raise ConfigError(
            f"--token, or {TOKEN_VARIABLE}, and --no-token exclude each other; leave one out"
        )
    if token is not None and not (token.strip() == token != "" and token.isascii()
                                  and token.isprintable()):  # fmt: skip
        raise ConfigError("--token must be printable ASCII without a space at its ends, as it "
                          "travels in a header")  # fmt: skip


def _check_keys(path: Path, keys: dict[str, str]) -> None:
    """Refuse names of what the policy does not read, where its run says what it reads."""
    from rlinf.envs.spec import written_spec
    from rlinf.runners.evaluation import run_of
    from rlinf.serving.requests import check_keys

    spec = written_spec(run_of(path))
    if spec is not None:
        check_keys(spec, keys)


def _of_run(
    source: str, path: Path, moved: list[str] | None, keys: dict[str, str]
) -> Callable[[], InitialPolicy]:
    from rlinf.cli.tasks import of_moved_model, task_of_run

    task, words = task_of_run(path), of_moved_model(moved)
    _require_acting(source, task)
    _check_keys(path, keys)

    def build() -> InitialPolicy:
        from rlinf.runners.embodied_evaluation import TrainedPolicy

        return TrainedPolicy(task, path, words)

    return build


def _of_recipe(source: str, overrides: list[str] | None) -> Callable[[], InitialPolicy]:
    from rlinf.cli.tasks import read_config
    from rlinf.config.validate import check
    from rlinf.runners.evaluation import require_beginning

    task, loaded, config = read_config(source, overrides or [], evaluated=True)
    _require_acting(source, task)
    config = task.for_evaluation(config)
    path = require_beginning(config, source)
    check(config, loaded)

    def build() -> InitialPolicy:
        from rlinf.runners.embodied_evaluation import InitialPolicy

        return InitialPolicy(config, str(path), path.resolve().name)

    return build


def _require_acting(source: str, task: AnyTask) -> None:
    from rlinf.workers.config.acting import EvaluatedConfig

    if not issubclass(task.config_class, EvaluatedConfig):
        raise ConfigError(f"{source} has no policy for actions; nearest: a run of a robot")


def _serve(
    source: Callable[[], InitialPolicy],
    settings: Any,
    block_size: int | None,
    device: str | None,
    *,
    made: bool,
    drawn: bool | None,
) -> None:
    import torch

    from rlinf.processes.allocator import keep_freed_memory
    from rlinf.scheduler.accelerators import process_device
    from rlinf.serving.acting import ActingPolicy
    from rlinf.serving.server import PolicyServer

    try:
        place = torch.device(device or process_device())
        torch.empty(1, device=place).item()  # a device that computes, which "meta" is not
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0][:200]
        raise ConfigError(
            f"--device = '{device}': {why}; nearest: {process_device()}, or leave it out"
        ) from error
    keep_freed_memory()
    trained = source()
    spec = trained.env_spec()
    by_mode = trained.config.evaluation.deterministic if drawn is None else not drawn
    acting = ActingPolicy(
        trained.build(spec).to(place),
        version=trained.step,
        block_size=block_size or trained.config.rollout.block_size,
        deterministic=by_mode,
    )
    server = PolicyServer(
        acting, spec, name=trained.source_name, settings=settings, newest=trained.newer
    )

    def ready(address: str) -> None:
        how = "by its mode (--mode)" if by_mode else "by drawn actions (--drawn)"
        say(f"{trained.name} acts {how} at ws://{address} on {place}; also POST "
            f"http://{address}/infer, /metrics, /healthz")  # fmt: skip
        if settings.token is not None and made:
            say(f"token: {settings.token}")

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def end() -> None:
            if stop.is_set():  # the policy may hang
                os._exit(INTERRUPTED)
            stop.set()

        for number in end_signals():
            loop.add_signal_handler(number, end)
        await server.run(stop, ready)

    with lasting("stdout"):
        asyncio.run(serve())
        say(f"stopped: {server.latencies}")


def require_serving(needed_for: str) -> None:
    """Refuse what needs the packages of a server or its client where they are not installed."""
    for package in ("aiohttp", "msgpack", "websockets"):
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(package, "serve", needed_for)


def _renaming(options: list[str]) -> dict[str, str]:
    keys: dict[str, str] = {}
    for given in options:
        theirs, sign, ours = given.partition("=")
        if not sign or not theirs:
            raise ConfigError(
                f"--key {given}: say which entry is which observation, such as "
                "--key observation/image=main_images"
            )
        if keys.setdefault(theirs, ours) != ours:
            raise ConfigError(f"--key: `{theirs}` is `{keys[theirs]}` and `{ours}`; leave one out")
    return keys
