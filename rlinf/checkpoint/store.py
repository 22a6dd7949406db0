"""Commits a run's state to a directory, all of it or nothing, and finds the newest good one.

    directory/step_00000120/manifest.json      checksums, step, meta, metric; written last
                           /tree.json          structure, numbers and text
                           /tensors-00000.safetensors …
                           /actor/…            what workers wrote themselves, if they did
    directory/latest -> step_00000120

A commit is written in a hidden directory beside its target, reaches the disk, and is renamed. A
process that dies at any moment leaves the older checkpoints and at most a hidden directory, which
nobody loads and the next writer removes. Loading executes no code: the files are JSON and
safetensors; those of workers they read themselves.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf.checkpoint.config import CheckpointConfig
from rlinf.checkpoint.contents import Checkpoint, Parts, PassedOver, load_checkpoint, write_files
from rlinf.checkpoint.files import is_disk_full, point_link, sync_directory
from rlinf.checkpoint.manifest import STEP_NAME, Manifest, read_manifest
from rlinf.checkpoint.tree import EncodedTree, encode
from rlinf.errors import CheckpointError

logger = logging.getLogger(__name__)

LATEST = "latest"
_WRITING, _REPLACED, _REMOVED = ".writing-", ".replaced-", ".removed-"


@dataclass(frozen=True)
class SaveFailure:
    """A checkpoint that did not fit on the disk."""

    step: int
    reason: str
    error: OSError


class CheckpointStore:
    """The checkpoints of one run, in a directory that the first save makes.

    One process writes; any number may read (``read_only=True`` leaves a writer's files alone).
    As a context manager the store is closed at the end.

    A background save costs the caller the snapshot in memory, and the rest of the write before if
    that is still going on: at most one is in flight and none is dropped. When a checkpoint does
    not fit on the disk, ``on_full_disk`` decides whether the next :meth:`save` or :meth:`wait`
    raises, or a warning is logged and noted in :attr:`failures`. Any other failure of the writer
    is always raised there.
    """

    def __init__(
        self,
        directory: Path | str,
        config: CheckpointConfig | None = None,
        *,
        config_hash: str | None = None,
        read_only: bool = False,
    ) -> None:
        self.directory = Path(directory)
        self.failures: list[SaveFailure] = []
        self.last_committed_step: int | None = None
        self._config = config or CheckpointConfig()
        self._config_hash = config_hash
        self._read_only, self._made = read_only, self.directory.is_dir()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None
        if not read_only:
            self._recover()

    def begin(self, step: int) -> Path | None:
        """A hidden directory for what workers write themselves, which becomes the checkpoint.

        It is to be handed to :meth:`save` as part of ``parts``, or to :meth:`give_up`. The save in
        flight has ended before. None: there is no room for it, and the run goes on.
        """
        self._refuse_reader()
        self.wait()
        directory = self._hidden(_WRITING, self.path(step))
        try:
            self._make(directory)
        except OSError as error:
            self._failed(step, error)
            return None
        return directory

    def give_up(self, directory: Path, step: int, error: BaseException) -> None:
        """Remove what :meth:`begin` gave, where workers could not write; as if a save failed so."""
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, OSError):
            self._failed(step, error)

    def save(
        self,
        step: int,
        tree: Any,
        *,
        meta: Mapping[str, Any] | None = None,
        metric: float | None = None,
        blocking: bool = False,
        parts: Parts | None = None,
    ) -> None:
        """Commit ``tree`` as the checkpoint of ``step``; one of the same step is replaced.

        Args:
            step: Training steps that are done.
            tree: What :mod:`rlinf.checkpoint.tree` can hold; may change after the return.
            meta: JSON values that are read without loading the tensors.
            metric: Figure for ``keep_best``, higher is better; not finite counts as none.
            blocking: Return after the commit, with its failure raised here.
            parts: What workers wrote for it already.

        Raises:
            TypeError: The tree or ``meta`` holds something that cannot be stored.
            CheckpointError: This save (if blocking) or the one before failed.
        """
        self._refuse_reader()
        self.wait()
        try:
            plain = json.loads(json.dumps(dict(meta or {}), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise TypeError(f"meta of a checkpoint must be JSON: {error}") from error
        usable = metric if metric is not None and math.isfinite(metric) else None
        manifest = Manifest(step, time.time(), {}, plain, usable, self._config_hash)
        self._in_flight = self._writer.submit(self._commit, manifest, encode(tree), parts)
        if blocking or not self._config.background:
            self.wait()

    def _refuse_reader(self) -> None:
        if self._read_only:
            raise CheckpointError(f"The checkpoints in {self.directory} were opened for reading.")

    def wait(self) -> None:
        """Return after the save in flight has ended; raises its CheckpointError, if it failed."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def require(self, step: int) -> None:
        """Raise the CheckpointError of a step whose save was tried, and did not fit on the disk."""
        self.wait()
        for failure in self.failures[::-1]:
            if failure.step == step and self.last_committed_step != step:
                raise CheckpointError(
                    f"The checkpoint of the last step, {step}, was not written to "
                    f"{self.directory}: {failure.reason}."
                ) from failure.error

    def close(self) -> None:
        """End the writer thread after the save in flight, see :meth:`wait`."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *trace: object) -> None:
        try:
            self.close()
        except CheckpointError as failure:
            if error is None:
                raise
            # The error on its way out came first; it is the one to report.
            logger.error("%s", failure)

    def discard_after(self, step: int) -> list[int]:
        """Remove every checkpoint beyond ``step``; return their steps.

        So the newest one is always of the history that a run, gone on from an older one, writes.
        One that somebody renamed, of an earlier step then, is put aside under another name.
        """
        self.wait()
        beyond = [number for number in self.steps() if number > step]
        for path in map(self.path, beyond):
            if _is_renamed(path):
                aside = path.with_name(f"aside_{path.name}-{secrets.token_hex(4)}")
                path.rename(aside)
                logger.warning("%s is kept as %s.", path, aside.name)
            else:
                self._remove(path)
        self._link_latest()
        return beyond

    def _commit(self, manifest: Manifest, tree: EncodedTree, parts: Parts | None) -> None:
        step, target = manifest.step, self.path(manifest.step)
        temporary = self._hidden(_WRITING, target) if parts is None else parts.directory
        try:
            if parts is None:
                self._make(temporary)
            write_files(temporary, manifest, tree, parts)
            self._put_in_place(temporary, target)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            self._failed(step, error)
            return
        self.last_committed_step = step
        self._prune(step)
        self._link_latest()

    def _hidden(self, prefix: str, path: Path) -> Path:
        return self.directory / f"{prefix}{path.name}-{secrets.token_hex(4)}"

    def _make(self, directory: Path) -> None:
        """A directory for a checkpoint; that of the run is not made again where it was moved."""
        if self._made and not self.directory.parent.is_dir():
            raise CheckpointError(
                f"{self.directory.parent} is no longer there: a run that is moved or removed while "
                "it goes on commits nothing more; what it had committed went with it"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._made = True
        directory.mkdir()

    def _put_in_place(self, temporary: Path, target: Path) -> None:
        replaced = self.directory / f"{_REPLACED}{target.name}"
        if target.exists():
            # Two renames; _recover undoes the first one if we die between them.
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        temporary.rename(target)
        sync_directory(self.directory)
        shutil.rmtree(replaced, ignore_errors=True)

    def _failed(self, step: int, error: OSError) -> None:
        reason = error.strerror or str(error)
        message = (
            f"The checkpoint of step {step} was not written to {self.directory}: {reason}. "
            "The checkpoints before it are unharmed."
        )
        if not is_disk_full(error) or self._config.on_full_disk == "stop":
            raise CheckpointError(message) from error
        self.failures.append(SaveFailure(step, reason, error))
        logger.warning("%s Training goes on; free some space.", message)

    def _prune(self, newest: int) -> None:
        """Remove what is neither newest nor best. Damaged ones are left for a person to see."""
        keep_last, keep_best = self._config.keep_last, self._config.keep_best
        if keep_last is None:
            return
        good = {step: manifest for step, manifest in self.manifests().items() if step <= newest}
        keep = {newest, *sorted(good)[-keep_last:]}
        if keep_best:
            keep.update(_ranked(good)[-keep_best:])
        for step in good.keys() - keep:
            self._remove(self.path(step))

    def _remove(self, path: Path) -> None:
        """Rename first: a removal that is cut short must not leave a damaged checkpoint."""
        hidden = self._hidden(_REMOVED, path)
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _recover(self) -> None:
        """Remove what a killed writer left and undo a replacement that it did not finish."""
        if not self.directory.is_dir():
            return
        for path in list(self.directory.iterdir()):
            if path.name.startswith(_REPLACED):
                target = self.directory / path.name.removeprefix(_REPLACED)
                if not target.exists():
                    path.rename(target)
                    continue
            if path.name.startswith((_WRITING, _REPLACED, _REMOVED)):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(f".{LATEST}."):
                path.unlink(missing_ok=True)  # killed before the new link replaced the old one

    def _link_latest(self) -> None:
        steps = self.steps()
        if steps:
            point_link(self.directory / LATEST, self.path(steps[-1]).name)

    def path(self, step: int) -> Path:
        """The directory of the checkpoint of ``step``, whether it is there or not."""
        return self.directory / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, oldest first; none of them is verified."""
        if not self.directory.is_dir():
            return []
        names = (STEP_NAME.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def manifests(self) -> dict[int, Manifest]:
        """Manifests by step, oldest first, of the checkpoints whose manifest is unharmed."""
        found: dict[int, Manifest] = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointError):
                found[step] = read_manifest(self.path(step))
        return found

    def load(self, which: int | str | Path = LATEST) -> Checkpoint:
        """Read and verify a checkpoint.

        ``which`` is a step; ``"latest"``, the newest one that is unharmed (newer ones that are not
        are logged and listed in ``refused``); ``"best"``, the same by metric; or the path of a
        checkpoint directory.

        Raises:
            CheckpointError: The one asked for is missing or damaged, or none is left.
        """
        if which == LATEST:
            return self._first_good(self.steps()[::-1], "checkpoint")
        if which == "best":
            ranked = _ranked(self.manifests())
            return self._first_good(ranked[::-1], "checkpoint with a metric")
        if not isinstance(which, int):
            return load_checkpoint(which)
        if self.path(which).is_dir():
            return load_checkpoint(self.path(which))
        nearest = min(self.steps(), key=lambda other: abs(other - which), default=None)
        hint = "" if nearest is None else f"; the nearest one is of step {nearest}"
        raise CheckpointError(f"{self.directory} has no checkpoint of step {which}{hint}.")

    def _first_good(self, steps: Sequence[int], wanted: str) -> Checkpoint:
        refused: list[PassedOver] = []
        for step in steps:
            try:
                found = load_checkpoint(self.path(step))
            except CheckpointError as error:
                on = "Trying the one before it." if step != steps[-1] else "There is no other one."
                logger.warning("%s %s", error, on)
                refused.append(PassedOver(self.path(step), str(error)))
            else:
                return replace(found, refused=tuple(refused))
        reasons = "".join(f"\n  {refusal.reason}" for refusal in refused)
        advice = "\n  Put back a copy of one, or begin anew with: rlinf train" if refused else ""
        raise CheckpointError(
            f"{self.directory} holds no {wanted} that can be used.{reasons}{advice}"
        )


def _ranked(manifests: Mapping[int, Manifest]) -> list[int]:
    """Steps whose checkpoint has a metric, the best last."""
    found = [(m.metric, step) for step, m in manifests.items() if m.metric is not None]
    return [step for _, step in sorted(found)]


def _is_renamed(path: Path) -> bool:
    try:
        return read_manifest(path, renamed=True).step != int(path.name.removeprefix("step_"))
    except CheckpointError:
        return False
