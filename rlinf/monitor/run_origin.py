"""What a run began with: its configuration, and the files that it read."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlinf.checkpoint.files import write_atomic
from rlinf.config.base import StrictModel
from rlinf.config.dump import leaves, to_data
from rlinf.config.named_files import Fingerprint, fingerprint, named_files
from rlinf.config.reference import file_of
from rlinf.config.validate import EVALUATED, refused_keys
from rlinf.errors import ConfigError

log = logging.getLogger(__name__)

ORIGIN_FILE = "origin.json"
_OTHER = "%s: %s is not what the run began with"
_SHOWN = 3


@dataclass(frozen=True)
class Origin:
    """Configuration and files of a run, as it began or was last resumed."""

    config: Mapping[str, Any]
    """As plain data, every default written out."""
    files: Mapping[str, Fingerprint] = field(default_factory=dict)
    """What was in the files and directories that the configuration names, by key."""

    @classmethod
    def of(cls, config: StrictModel) -> Origin:
        """Look at the files of a configuration.

        Raises:
            ConfigError: One cannot be read.
        """
        return cls(to_data(config), {key: _read(key, path) for key, path in named_files(config)})

    @classmethod
    def load(cls, run: Path) -> Origin | None:
        """Of the run in a directory; None where none was written down."""
        file = run / ORIGIN_FILE
        if not file.is_file():
            return None
        try:
            return cls(**json.loads(file.read_bytes()))
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{file} is damaged ({error}): put back a copy of it, or delete it, after which "
                "changes of what the run trains are not found any more"
            ) from error

    def save(self, run: Path) -> None:
        """Write it to the directory of the run."""
        write_atomic(run / ORIGIN_FILE, json.dumps(asdict(self)).encode())

    def refuse_other_files(
        self, config: StrictModel, *, section: str = "", changed_code: bool = False
    ) -> None:
        """Refuse files, of a section alone if one is given, that are not those of the beginning.

        They may lie elsewhere by now. A key that named none then is not looked at. With
        ``changed_code`` files of Python may differ, which is logged.

        Raises:
            ConfigError: One differs or is gone, by key.
        """
        for key, path, changed in self._other_files(config, section):
            code = path.suffix == ".py"
            if code and changed_code:
                log.warning(_OTHER, key, path)
            else:
                instead = ", go on with what is in them now: --changed-code," if code else ","
                more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
                raise ConfigError(
                    f"{path} is not what the run began with: {', '.join(changed[:_SHOWN])}{more}. "
                    f"Put those files back{instead} or begin a new run",
                    key=key,
                )

    def tell_other_files(self, config: StrictModel, *, section: str) -> None:
        """Warn of files of a section that are not those of the beginning."""
        for key, path, _ in self._other_files(config, section):
            log.warning(_OTHER, key, path)

    def _other_files(
        self, config: StrictModel, section: str
    ) -> Iterator[tuple[str, Path, list[str]]]:
        for key, path in named_files(config):
            if key not in self.files or not f"{key}.".startswith(f"{section}." if section else ""):
                continue
            if changed := _changes(self.files[key], _read(key, path)):
                yield key, path, changed

    def refuse_other_config(
        self,
        config: StrictModel,
        changeable: Sequence[str],
        *,
        why: str,
        evaluated: bool = False,
    ) -> None:
        """Refuse other values of keys that decided what was trained so far.

        Paths of what the run read may be others: :meth:`refuse_other_files` looks at what is there.
        So may values that are refused by now, with which nothing goes on; that is logged. Where
        what was trained is ``evaluated``, those that stand against training alone may not. What
        was not so, or not written, then may be told, see :meth:`StrictModel.may_be_told`.

        Raises:
            ConfigError: Names each key with both values.
        """
        data = to_data(config)
        for key in self.files:
            with suppress(KeyError):  # a module is no value
                _put(data, key, _value(self.config, key))
        old, new = self._completed(config, evaluated=evaluated), dict(leaves(data))
        changed = [
            f"{key} = {new.get(key)} (it was {old.get(key)})"
            for key in old | new
            if old.get(key) != new.get(key)
            and not any(key == name or key.startswith(f"{name}.") for name in changeable)
            # Of an empty section each key is looked at that it has now.
            and not (old.get(key) == {} and any(each.startswith(f"{key}.") for each in new))
            and not _may_be_told(config, key, old.get(key), new.get(key))
        ]
        if changed:
            raise ConfigError(
                f"{why} keeps what it trains; not changeable: {', '.join(changed)}. "
                f"Changeable: {', '.join(changeable) or 'nothing'}. "
                "For another value start a new run."
            )

    def _completed(self, config: StrictModel, *, evaluated: bool) -> dict[str, Any]:
        """The leaves of the configuration as it would be written now: with the defaults of keys
        that came later, and, of values that are refused by now, those that ``config`` has."""
        data, new, given_up = deepcopy(dict(self.config)), to_data(config), dict[str, Any]()
        while True:
            try:
                found = type(config).model_validate(data, context={EVALUATED: evaluated})
                return dict(leaves(to_data(found))) | given_up
            except ValidationError as error:
                keys = refused_keys(error, data)
            if any(_correct(data, key, new, given_up) for key in keys):
                continue
            if evaluated:
                break
            evaluated = True  # it is legal by what may change, as a longer run
        # It contradicts itself by now: what it has not is not compared.
        old = dict(leaves(data)) | given_up
        above = tuple(f"{key}." for key in old)
        return {key: value for key, value in leaves(new) if not key.startswith(above)} | old


def _may_be_told(section: Any, key: str, was: Any, value: Any) -> bool:
    """See :meth:`StrictModel.may_be_told`, of the section and those below it."""
    while isinstance(section, StrictModel):
        if section.may_be_told(key, was, value):
            return True
        name, _, key = key.partition(".")
        section = getattr(section, name, None)
    return False


def _read(key: str, path: Path) -> Fingerprint:
    try:
        return fingerprint(path)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path} cannot be read: {error.strerror}. If it was moved, say "
            f"where it is: {key}=PATH{':NAME' if path.suffix == '.py' else ''}",
            key=key,
        ) from error


def _changes(before: Fingerprint, now: Fingerprint) -> list[str]:
    if len(before) == len(now) == 1:  # a file may have another name where it lies now
        return [] if [*before.values()] == [*now.values()] else [f"{next(iter(now))} differs"]
    words = {
        name: "differs" if name in before and name in now
        else "is new" if name in now
        else "is missing"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    }  # fmt: skip
    return [f"{name} {word}" for name, word in words.items()]


def _entry(data: Any, part: str) -> Any:
    return data[part] if isinstance(data, Mapping) else data[int(part)]


def _value(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = _entry(data, part)
    return data


def _correct(data: Any, key: str, new: Any, given_up: dict[str, Any]) -> bool:
    """Whether another value, in ``new``, took the place of a refused one, or nothing did of a key
    that was ``given_up``. A section is not replaced, as it holds what is not refused, too."""
    *above, last = key.split(".")
    try:
        for part in above:
            data, new = _entry(data, part), _entry(new, part)
    except (KeyError, IndexError, ValueError, TypeError):
        return False
    if not (isinstance(data, dict) and isinstance(new, Mapping)):
        return False
    was = data.get(last)
    if last in data and last not in new:
        given_up.update(leaves({key: data.pop(last)}))
        return True
    if last not in new or isinstance(was, Mapping | list) or was == new[last]:
        return False
    if last in data:
        log.warning("%s: %s is refused by now, it goes on with %s", key, was, new[last])
    data[last] = new[last]
    return True


def _put(data: Any, key: str, value: Any) -> None:
    """Replace the path of an entry that is there, not null, and names nothing else in its file."""
    *above, last = key.split(".")
    try:
        for part in above:
            data = _entry(data, part)
        present = _entry(data, last)
        if present is not None and _in_file(present) == _in_file(value):
            data[last if isinstance(data, Mapping) else int(last)] = value
    except (KeyError, IndexError, ValueError, TypeError):
        pass  # another number of sets or of files, which is a change


def _in_file(value: str) -> str | None:
    """What ``FILE.py:NAME`` names; None of a path."""
    return value.rpartition(":")[2] if file_of(value) else None
