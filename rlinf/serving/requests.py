"""What clients ask: observations, checked against what the policy was trained on before it acts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf.config.nearest import did_you_mean
from rlinf.envs.base import INSTRUCTION_KEY, INSTRUCTION_SHAPE, instruction_bytes, instruction_text
from rlinf.envs.results import TASK_IDS
from rlinf.envs.spec import EnvSpec, parts_in_words
from rlinf.errors import ConfigError, UserError

PROMPT, BATCH = "prompt", "batch"
_TOLD = 200
PREFIX, PREFIX_WEIGHTS = "prefix", "prefix_weights"
MOST_ROWS = 1024
"""Observations of one request."""
_SHOWN = 8
_DEEPEST = 8


class RefusedRequestError(UserError):
    """A request that the policy must not see; one line says what, why and what would be legal."""


@dataclass(frozen=True)
class ExecutedPrefix:
    """Actions that are executed before, or while, the next chunk is computed.

    Args:
        actions: [C, A] float32, as the policy gives them; 0 where none is known.
        weights: [C] float32 in [0, 1]: how firmly the new chunk must agree with each of them.
    """

    actions: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True)
class ActionRequest:
    """One thing that is asked.

    Args:
        observations: By key [B, ...], as the env of the policy gives them.
        count: B.
        single: Whether the client sent one observation, and gets [C, A] instead of [B, C, A].
        prefix: Only with a single observation.
    """

    observations: dict[str, np.ndarray]
    count: int
    single: bool
    prefix: ExecutedPrefix | None = None


def check_keys(spec: EnvSpec, keys: Mapping[str, str]) -> None:
    """Refuse, by a ConfigError, names for what a policy of this spec does not read, or two for the
    same."""
    legal = _names(spec)
    for source, target in keys.items():
        if target and target not in legal:
            raise ConfigError(f"--key {source}={target}: the policy reads no `{target}`; "
                              f"{did_you_mean(target, legal)}")  # fmt: skip
    targets = [target for target in keys.values() if target]
    for target in targets:
        if targets.count(target) > 1:
            raise ConfigError(f"--key: two names are given for `{target}`; leave one out")


def _names(spec: EnvSpec) -> list[str]:
    """What a client may give, of which `prompt` only to a policy that knows texts."""
    worded = spec.task_descriptions or INSTRUCTION_KEY in spec.observation_shapes
    return [*spec.observation_shapes, *([PROMPT] if worded else [])]


class RequestReader:
    """Turns messages into requests.

    Args:
        spec: What the policy was trained on.
        chunk: C, primitive actions of an answer.
        keys: Names that clients use to names of observations, ``prompt`` or, to be left out, "".
        continues: Whether the policy takes a prefix.
        check_instruction: Raises a :class:`RefusedRequestError` for an instruction that a policy
            which reads them cannot be told.

    Raises:
        ConfigError: ``keys`` names what the policy does not read, or the same twice.
    """

    def __init__(
        self,
        spec: EnvSpec,
        *,
        chunk: int,
        keys: Mapping[str, str],
        continues: bool,
        check_instruction: Callable[[str], None],
    ) -> None:
        self._spec, self._chunk, self._keys, self._continues = spec, chunk, dict(keys), continues
        self._check_instruction = check_instruction
        self._tasks = {_plain(text): number for number, text in
                       reversed(list(enumerate(spec.task_descriptions)))}  # fmt: skip
        check_keys(spec, keys)

    def read(self, message: Any) -> ActionRequest:
        """The request in a message.

        Raises:
            RefusedRequestError: It is not what the policy was trained on.
        """
        if not isinstance(message, Mapping):
            raise RefusedRequestError(
                f"a request is a mapping from names to arrays, not {type(message).__name__}"
            )
        if BATCH not in message:
            given = dict(self._renamed(message))
            prefix = self._prefix(given)
            row = self._row(given)
            return ActionRequest({key: array[None] for key, array in row.items()}, 1, True, prefix)
        rows = message[BATCH]
        if len(message) > 1 or not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):
            raise RefusedRequestError(f"`{BATCH}` is a list of observations, and stands alone")
        if not 1 <= len(rows) <= MOST_ROWS:
            raise RefusedRequestError(
                f"`{BATCH}` has {len(rows)} observations; legal: 1 to {MOST_ROWS}"
            )
        found = [self._numbered(number, row) for number, row in enumerate(rows)]
        whole = {key: np.stack([row[key] for row in found]) for key in found[0]}
        return ActionRequest(whole, len(found), False)

    def _numbered(self, number: int, row: Any) -> dict[str, np.ndarray]:
        try:
            if not isinstance(row, Mapping):
                raise RefusedRequestError(f"is no mapping but {type(row).__name__}")
            given = dict(self._renamed(row))
            if self._prefix(given) is not None:
                raise RefusedRequestError(
                    f"`{PREFIX}` and `{PREFIX_WEIGHTS}` go with an observation that is sent alone; "
                    f"leave them out, or send it without `{BATCH}`"
                )
            return self._row(given)
        except RefusedRequestError as error:
            raise RefusedRequestError(f"observation {number} of the batch: {error}") from error

    def _renamed(self, message: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        """Entries by our names; those of mappings inside the message are joined with a slash."""
        seen: set[str] = set()
        for source, value in _flat(message):
            name = self._keys.get(source, source)
            if name in seen:
                raise RefusedRequestError(
                    f"`{_cut(name)}` is given twice, once as `{_cut(source)}`"
                )
            if name:
                seen.add(name)
                yield name, value

    def _row(self, given: dict[str, Any]) -> dict[str, np.ndarray]:
        shapes, types = self._spec.observation_shapes, self._spec.observation_dtypes
        self._name_task(given)
        for name in given:
            if name not in shapes:
                self._refuse_part(name)
                told, near = _cut(name), did_you_mean(name, _names(self._spec))
                raise RefusedRequestError(
                    f"the policy reads no `{told}`; {near}; rename it with "
                    f"--key {told}=NAME or leave it out with --key {told}= at the server"
                )
        for name in shapes:
            if name not in given:
                raise RefusedRequestError(
                    f"`{name}` is missing: {types[name]} {list(shapes[name])}; "
                    f"given: {_cut(', '.join(given)) or 'nothing'}"
                )
        row = {name: _checked(name, given[name], shapes[name], types[name]) for name in shapes}
        count = len(self._spec.task_descriptions)
        if TASK_IDS in row and not 0 <= row[TASK_IDS] < count:
            raise RefusedRequestError(f"`{TASK_IDS}` is {row[TASK_IDS]}; legal: 0 to {count - 1}")
        if INSTRUCTION_KEY in row:
            self._check_instruction(_words(row[INSTRUCTION_KEY]))
        return row

    def _refuse_part(self, name: str) -> None:
        """Say of what the environment itself calls a part of ``states`` where it belongs."""
        spec = self._spec
        if name.replace("/", ".") in dict(spec.state_parts) and "states" in spec.observation_shapes:
            raise RefusedRequestError(
                f"`{_cut(name)}` is a part of `states` "
                f"{list(spec.observation_shapes['states'])}: send as `states`, one behind the "
                f"other, {parts_in_words(spec)}"
            )

    def _name_task(self, given: dict[str, Any]) -> None:
        """Put the number of the task in place of its text."""
        texts = self._spec.task_descriptions
        if INSTRUCTION_KEY in self._spec.observation_shapes:
            self._put_in_words(given)
            return
        if PROMPT not in given:
            if TASK_IDS in self._spec.observation_shapes and TASK_IDS not in given:
                raise RefusedRequestError(f"`{PROMPT}` is missing: one of {_shown(texts)}")
            return
        text = given.pop(PROMPT)
        if not isinstance(text, (str, np.str_)):
            raise RefusedRequestError(f"`{PROMPT}` is {type(text).__name__}, not a text")
        if not texts:
            raise RefusedRequestError(
                f"the policy knows no texts; leave `{PROMPT}` out, or start the server with "
                f"--key {PROMPT}="
            )
        number = self._tasks.get(_plain(text))
        if number is None:
            hint = did_you_mean(text, texts) if len(texts) <= _SHOWN else _nearest(text, texts)
            raise RefusedRequestError(f"`{PROMPT}` = {_cut(str(text))!r} is no task of the policy; "
                                      f"{hint}")  # fmt: skip
        if TASK_IDS in given:
            raise RefusedRequestError(f"`{PROMPT}` and `{TASK_IDS}` say the same; give one")
        if TASK_IDS in self._spec.observation_shapes:
            given[TASK_IDS] = np.int64(number)

    def _put_in_words(self, given: dict[str, Any]) -> None:
        """Put a text, whatever it says, in the form in which observations hold it."""
        if PROMPT not in given:
            if INSTRUCTION_KEY not in given:
                raise RefusedRequestError(f"`{PROMPT}` is missing: what is to be done, in words")
            return
        text, most = given.pop(PROMPT), INSTRUCTION_SHAPE[0]
        if not isinstance(text, (str, np.str_)):
            raise RefusedRequestError(f"`{PROMPT}` is {type(text).__name__}, not a text")
        if len(text.encode()) > most:
            raise RefusedRequestError(
                f"`{PROMPT}` has {len(text.encode())} bytes; legal: {most} or fewer"
            )
        if INSTRUCTION_KEY in given:
            raise RefusedRequestError(f"`{PROMPT}` and `{INSTRUCTION_KEY}` say the same; give one")
        given[INSTRUCTION_KEY] = instruction_bytes(str(text))

    def _prefix(self, given: dict[str, Any]) -> ExecutedPrefix | None:
        if not given.keys() & {PREFIX, PREFIX_WEIGHTS}:
            return None
        if not self._continues:
            raise RefusedRequestError(
                f"the policy continues no chunk; leave `{PREFIX}` and `{PREFIX_WEIGHTS}` out"
            )
        if not given.keys() >= {PREFIX, PREFIX_WEIGHTS}:
            raise RefusedRequestError(f"`{PREFIX}` and `{PREFIX_WEIGHTS}` go together")
        array = given[PREFIX]
        count = len(array) if isinstance(array, np.ndarray) and array.ndim == 2 else 0
        if not 1 <= count <= self._chunk:
            raise RefusedRequestError(
                f"`{PREFIX}` must be [n, {self._spec.action_dim}] with n from 1 to {self._chunk}"
            )
        actions = np.zeros((self._chunk, self._spec.action_dim), np.float32)
        weights = np.zeros(self._chunk, np.float32)
        shape = (count, self._spec.action_dim)
        given_actions = _checked(PREFIX, given.pop(PREFIX), shape, "float32")
        actions[:count] = self._spec.of_units(given_actions)
        weights[:count] = _checked(PREFIX_WEIGHTS, given.pop(PREFIX_WEIGHTS), (count,), "float32")
        if weights.min() < 0 or weights.max() > 1:
            raise RefusedRequestError(f"`{PREFIX_WEIGHTS}` lie in [0, 1]")
        return ExecutedPrefix(actions, weights)


def _checked(name: str, value: Any, shape: tuple[int, ...], wanted: str) -> np.ndarray:
    """An entry in the type of the env; floating-point numbers may come in any precision."""
    if not isinstance(value, (np.ndarray, np.generic)) and not (
        name == TASK_IDS and type(value) is int
    ):
        raise RefusedRequestError(
            f"`{name}` is {type(value).__name__}, not an array of {wanted} {list(shape)}"
        )
    array = np.asarray(value)
    kind = np.dtype(wanted).kind
    # Of integers only the number counts, of pictures the type says what range they have.
    same = array.dtype == wanted if wanted == "uint8" else array.dtype.kind == kind
    if not same:
        hint = " (0 to 255)" if wanted == "uint8" else ""
        raise RefusedRequestError(f"`{name}` has type {array.dtype}; legal: {wanted}{hint}")
    if array.shape != shape:
        raise RefusedRequestError(_other_shape(name, array.shape, shape))
    with np.errstate(over="ignore"):
        array = array.astype(wanted, copy=False)
    if kind == "f" and not np.isfinite(array).all():
        where = np.unravel_index(int(np.argmin(np.isfinite(array))), array.shape)
        raise RefusedRequestError(
            f"`{name}` holds what is no finite number, first at {[int(i) for i in where]}"
        )
    return array


def _words(instruction: np.ndarray) -> str:
    """The text that a client gave in the form of observations."""
    try:
        return instruction_text(instruction)
    except UnicodeDecodeError as error:
        raise RefusedRequestError(
            f"`{INSTRUCTION_KEY}` is no UTF-8 ({error.reason}); nearest: `{PROMPT}`, a text"
        ) from error


def _other_shape(name: str, given: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    said = f"`{name}` is {list(given)}; legal: {list(wanted)}"
    if len(wanted) >= 3 and given == (*wanted[:-3], wanted[-1], *wanted[-3:-1]):
        return f"{said}: its channels come first, they must come last"
    return said


def _flat(message: Mapping[Any, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    if above.count("/") > _DEEPEST:
        raise RefusedRequestError(f"mappings lie in each other more than {_DEEPEST} deep")
    for name, value in message.items():
        if not isinstance(name, str):
            raise RefusedRequestError(f"a name is a text, not {type(name).__name__}")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}/")
        else:
            yield f"{above}{name}", value


def _plain(text: str) -> str:
    """A text without what nobody means by it: capitals, spaces, a full stop."""
    return " ".join(text.casefold().split()).rstrip(". ")


def _nearest(text: str, texts: Sequence[str]) -> str:
    from rlinf.config.nearest import nearest_names

    close = nearest_names(text, texts)
    return f"nearest: {' | '.join(close)}" if close else f"known: {_shown(texts)}"


def _shown(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return " | ".join(texts[:_SHOWN]) + more


def _cut(text: str) -> str:
    """What a message says of a text that a client sent, which may be of any length."""
    return text if len(text) <= _TOLD else f"{text[:_TOLD]}…"
