"""YAML as recipes are written: plain scalars of YAML 1.2, line numbers, no key twice."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import yaml

from rlinf.errors import ConfigError

_UNFIT = (AttributeError, LookupError)
"""Of PyYAML, where a value is not of the kind that a tag before it says: `!!timestamp 2020`."""
_UNREADABLE = (yaml.YAMLError, ValueError, RecursionError, *_UNFIT)
"""Of PyYAML; of a number with thousands of digits; of thousands of brackets."""
_TAG = "tag:yaml.org,2002:"
_NO_NAMES = {f"{_TAG}bool": "true or false", f"{_TAG}null": "null", f"{_TAG}float": "a number"}
"""Kinds of scalars that are no name of a key."""
_Pair = tuple[yaml.Node, yaml.Node]
_NESTING, _DEEPEST = ("[", "{", "- ", "? ", "-\t", "?\t", "-\n", "?\n"), 2000
"""What opens a level, and may stand behind another one in a line; so many levels at most."""
_Written = Callable[[yaml.MappingNode], list[_Pair]]
_Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]


if TYPE_CHECKING:
    _Base = yaml.SafeLoader
else:
    _Base = object


class _Recipe(_Base):
    """PyYAML with the scalars of YAML 1.2.

    PyYAML reads ``0:30`` as a number to base 60, ``on`` as true, ``010`` as octal and ``1e-3`` as
    text. The first would silently change a placement, the last a learning rate.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.deep_construct = True  # refuses an anchor that holds itself
        self._written: dict[yaml.MappingNode, list[_Pair]] = {}

    def written(self, node: yaml.MappingNode) -> list[_Pair]:
        """Keys and values as they stand there, ``<<`` among them."""
        return self._written[node] if node in self._written else list(node.value)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put what ``<<`` names among the keys, where those that stand there go before it."""
        self._written.setdefault(node, list(node.value))
        super().flatten_mapping(node)

    def close(self) -> None:
        """Let go of what it reads."""
        self.dispose()

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """``{type:math}`` is to YAML one key without a value: name what is missing."""
        for pair in node.value:
            plain = all(isinstance(part, yaml.ScalarNode) and not part.style for part in pair)
            key, value = pair
            if isinstance(key, yaml.ScalarNode) and key.tag in _NO_NAMES:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key `{key.value}` is {_NO_NAMES[key.tag]} to YAML; put it into quotes",
                    key.start_mark,
                )
            if plain and ":" in key.value and not value.value:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"`{key.value}` needs a space after its colon, or quotes around the whole",
                    key.start_mark,
                )
        return super().construct_mapping(node, deep)


class _RecipeLoader(_Recipe, yaml.SafeLoader):
    yaml_implicit_resolvers: _Resolvers = {}  # noqa: RUF012


class _FastLoader(_Recipe, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads several times as fast by libyaml, where PyYAML was built with it.

    What it cannot read is for :class:`_RecipeLoader` to say in the words of PyYAML; nor is what is
    nested so deep that libyaml, which counts no levels, would leave its stack.
    """

    yaml_implicit_resolvers: _Resolvers = {}  # noqa: RUF012


_FLOAT = (
    r"^[-+]?(?:(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$"
    r"|^\.(?:nan|NaN|NAN)$"
)
for _kind, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^[-+]?[0-9][0-9_]*$", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", r"^<<$", ["<"]),
):
    for _loader in (_RecipeLoader, _FastLoader):
        _loader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(_pattern), _first)
for _loader in (_RecipeLoader, _FastLoader):
    _loader.add_constructor(f"{_TAG}int", lambda _, node: int(node.value.replace("_", "")))


class _RecipeDumper(yaml.SafeDumper):
    """Quotes the text that :class:`_RecipeLoader` would otherwise read as something else."""

    yaml_implicit_resolvers = _RecipeLoader.yaml_implicit_resolvers


class _FastDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes the same, but escapes what lies behind the first 65,536 characters of Unicode."""

    yaml_implicit_resolvers = _RecipeLoader.yaml_implicit_resolvers


def read_yaml(text: str, where: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping that ``text`` holds, no key twice, and the line of every dotted key."""
    try:
        node, data, written = _read(text)
    except _UNREADABLE as error:
        raise ConfigError(f"{where}: not readable as YAML: {_one_line(error)}") from error
    if node is None:
        return {}, {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where}: its top must be a mapping (key: value)")
    lines: dict[str, int] = {}
    _note_lines(node, "", where, lines, written)
    return data, lines


def read_value(text: str, where: str) -> Any:
    """Return the value that ``text`` stands for in a recipe: number, text, list, null, …; no key
    twice."""
    try:
        node, value, written = _read(text)
    except _UNREADABLE as error:
        raise ConfigError(
            f"{where}: {text!r} is not a YAML value: {_one_line(error)}. "
            "Text with special characters needs quotes, inside those of the shell."
        ) from error
    if node is not None:
        _refuse_twice(node, where, written)
    return value


def _read(text: str) -> tuple[yaml.Node | None, Any, _Written]:
    """The node of a document, None where it is empty; what it stands for; and what is written."""
    if sum(map(text.count, _NESTING)) < _DEEPEST:
        with suppress(*_UNREADABLE):
            return _read_by(_FastLoader, text)
    return _read_by(_RecipeLoader, text)


def _read_by(loader_class: type[Any], text: str) -> tuple[yaml.Node | None, Any, _Written]:
    with closing(loader_class(text)) as loader:
        node = loader.get_single_node()
        value = None if node is None else loader.construct_document(node)
        return node, value, loader.written


def write_yaml(data: Any) -> str:
    """Return ``data`` as YAML that :func:`read_yaml` reads back equal, keys in their order."""
    text = _written_by(_FastDumper, data)
    return _written_by(_RecipeDumper, data) if r"\U" in text else text


def _written_by(dumper: type[Any], data: Any) -> str:
    text: str = yaml.dump(
        data, Dumper=dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
    return text


def _refuse_twice(node: yaml.Node, where: str, written: _Written) -> None:
    """Refuse a key that is given twice in a mapping of a value: YAML would keep the last."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_twice(item, where, written)
    elif isinstance(node, yaml.MappingNode):
        pairs = written(node)
        keys = Counter(key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode))
        for key, count in keys.items():
            if count > 1:
                raise ConfigError(f"{where}: `{key}` is given twice; keep one of them")
        for _, value in pairs:
            _refuse_twice(value, where, written)


def _note_lines(
    node: yaml.MappingNode, prefix: str, where: str, lines: dict[str, int], written: _Written
) -> None:
    merged: list[yaml.Node] = []
    for key_node, value_node in written(node):
        if not isinstance(key_node, yaml.ScalarNode):
            continue
        if key_node.tag == f"{_TAG}merge":
            several = isinstance(value_node, yaml.SequenceNode)
            merged += value_node.value if several else [value_node]
            continue
        key = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if key in lines:
            raise ConfigError(
                f"{where} line {line}: `{key}` is given twice (first in line {lines[key]}); "
                "keep one of them"
            )
        lines[key] = line
        if isinstance(value_node, yaml.MappingNode):
            _note_lines(value_node, f"{key}.", where, lines, written)
        elif isinstance(value_node, yaml.SequenceNode):
            for place, item in enumerate(value_node.value):
                if isinstance(item, yaml.MappingNode):
                    lines[f"{key}.{place}"] = item.start_mark.line + 1
                    _note_lines(item, f"{key}.{place}.", where, lines, written)
    for section in merged:
        if isinstance(section, yaml.MappingNode):
            inherited: dict[str, int] = {}
            _note_lines(section, prefix, where, inherited, written)
            lines.update({key: line for key, line in inherited.items() if key not in lines})


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        line, problem = error.problem_mark.line + 1, error.problem or ""
        if r"'\t'" in problem:
            return f"a tab in line {line}; YAML is indented by spaces"
        return f"{problem} (line {line})"
    if isinstance(error, _UNFIT):
        return "a value is not of the kind that the tag before it (!!) says"
    return " ".join(str(error).split())
