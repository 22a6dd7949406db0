"""Episodes of an evaluation that have ended, written down one by one: one that is interrupted, or
killed, goes on from there."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlinf.envs.results import EpisodeRecord

log = logging.getLogger(__name__)

_FORMAT = "rlinf-played-episodes/1"


@dataclass(frozen=True)
class PlayedEpisodes:
    """What an evaluation has played so far, in a file for each worker that plays.

    Args:
        stem: What the names of the files begin with, in a directory that is there.
        of: What is evaluated, and how: all that an outcome depends on. What other files hold is of
            another evaluation, and is replaced.
    """

    stem: Path
    of: Mapping[str, Any]

    def read(self) -> dict[int, EpisodeRecord]:
        """The sound episodes that have ended, by their ids."""
        found = {}
        for path in self.files():
            lines = path.read_bytes().splitlines()
            if not lines or lines[0] != self._first_line().rstrip():
                continue
            for line in lines[1:]:
                with suppress(ValueError, TypeError):  # a last line that was not written whole
                    record = EpisodeRecord(**json.loads(line))
                    found[record.episode_id] = record
        return found

    def files(self) -> list[Path]:
        """Those that are there."""
        return sorted(self.stem.parent.glob(f"{self.stem.name}.*.jsonl"))

    def remove(self) -> None:
        """Forget them, once the result is written."""
        for path in self.files():
            path.unlink(missing_ok=True)

    def writer(self, rank: int) -> PlayedEpisodesWriter:
        """What writes down the episodes of a worker."""
        return PlayedEpisodesWriter(
            self.stem.with_name(f"{self.stem.name}.{rank}.jsonl"), self._first_line()
        )

    def _first_line(self) -> bytes:
        return json.dumps({"format": _FORMAT, **self.of}, sort_keys=True).encode() + b"\n"


class PlayedEpisodesWriter:
    """Adds lines to a file that no other evaluation writes to meanwhile; a context manager.

    Nothing is written where the directory is not there, as on a machine of its own, where another
    evaluation writes the same, or once the disk is full.
    """

    def __init__(self, path: Path, first_line: bytes) -> None:
        self._path, self._first_line = path, first_line
        self._file = -1

    def __enter__(self) -> Self:
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with os.fdopen(os.dup(self._file), "rb") as there:
                content = there.read()
            if not content.startswith(self._first_line):
                os.ftruncate(self._file, 0)
                content = self._first_line
                os.write(self._file, content)
            if not content.endswith(b"\n"):  # a line that was not written whole ends here
                os.write(self._file, b"\n")
        except OSError as error:
            self._end(error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def add(self, episodes: Iterable[EpisodeRecord]) -> None:
        """Write down episodes that have ended; a faulty one is played again."""
        lines = [json.dumps(asdict(each)).encode() + b"\n" for each in episodes if each.valid]
        if not lines or self._file < 0:
            return
        try:
            os.write(self._file, b"".join(lines))
        except OSError as error:
            self._end(error)

    def _end(self, why: OSError | None = None) -> None:
        if why is not None:
            log.warning(
                "An evaluation that is interrupted begins anew: %s is not written: %s",
                self._path, why.strerror,
            )  # fmt: skip
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
