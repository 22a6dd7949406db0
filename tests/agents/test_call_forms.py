"""Calls in the form of a chat template, and replies between tags of one's own."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

pytest.importorskip("transformers")

from rlinf.agents.call_forms import CALL_TAGS, Call, ChatTemplate
from rlinf.agents.conversations import Conversations
from rlinf.agents.tool import AgentConfig, Tool, ToolError
from rlinf.agents.tool_use import ToolUse
from rlinf.data.sequences import Completion
from rlinf.data.tokenizer import train_tokenizer
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import GenerationRequest
from rlinf.errors import ConfigError

from .support import ALPHABET, ScriptedEngine, array

# Replies that follow each other are one message of the user; `mood` is what a data set may say.
TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<user>{% endif -%}
<tool_response>{{ m.content }}</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<eos>:{% endif -%}
{%- elif m.role == 'assistant' -%}
<assistant>{% if loop.last %}<think></think>{% endif %}{{ m.content }}<eos>:
{%- else -%}
<{{ m.role }}>{{ m.content }}<eos>:
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{{ mood }}{% endif -%}"""
WHOLE = (*CALL_TAGS, "<tool_response>", "</tool_response>", "<think>", "</think>")
TOOLS = """
def look(word: str, times: int = 1, *, joined: str = " ") -> str:
    return joined.join([word] * times)

def add(a: int, b: int) -> str:
    return str(a + b)

async def later(a):
    return a
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    found = train_tokenizer([ALPHABET + ',"{}_[]<>\\'], folder, whole=WHOLE)
    found.chat_template = TEMPLATE
    return found


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    file = tmp_path / "tools.py"
    file.write_text(TOOLS, encoding="utf-8")
    look = {"type": "function", "function": f"{file}:look", "options": {"joined": "/"}}
    return AgentConfig(calls="chat_template", tools={"look": look, "calc": {"type": "calculator"}})


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def talked(
    words: Any, config: AgentConfig, *turns: str, arguments: Mapping[str, Any] | None = None
) -> Completion:
    """What becomes of the turns of a model, each of which it ends itself."""
    said = [
        token
        for turn in turns
        for token in (*words.encode(turn, add_special_tokens=False), words.eos_token_id)
    ]
    use = ToolUse(config, words, arguments)
    engine = Conversations(
        ScriptedEngine({0: said}, words.eos_token_id), use, max_turns=config.max_turns
    )
    request = GenerationRequest(
        request_id=0,
        prompt_tokens=array(words.encode("12", add_special_tokens=False)),
        seed=0,
        sampling=SamplingConfig(max_new_tokens=1000),
    )
    (found,) = engine.generate([request])
    completion = found.completion
    assert completion.sampled_tokens.tolist() == said
    return completion


def text(words: Any, completion: Completion) -> str:
    found: str = words.decode(completion.tokens.tolist())
    return found


def test_replies_are_messages_of_tools_behind_the_turn(words: Any, config: AgentConfig) -> None:
    first = f"so {call('look', {'word': 'ab', 'times': 2})}"
    found = talked(words, config, first, "done", arguments={"mood": "hm "})
    reply = ":<user><tool_response>ab/ab</tool_response><eos>:<assistant>hm "
    assert text(words, found) == f"{first}<eos>{reply}done<eos>"
    given = found.tokens[~found.mask.astype(bool)].tolist()
    assert words.decode(given) == reply
    assert (found.turns, found.stop_reason) == (2, "stop")


def test_all_calls_of_a_turn_are_replied_to_in_their_order(words: Any, config: AgentConfig) -> None:
    calls = call("calc", {"expression": "2*3"}) + call("look", {"word": "x"})
    found = talked(words, config, calls, call("calc", {"e": "7-9"}), "end")
    replies = "<tool_response>6</tool_response><tool_response>x</tool_response>"
    assert f"{calls}<eos>:<user>{replies}<eos>:<assistant>" in text(words, found)
    assert "<user><tool_response>-2</tool_response><eos>" in text(words, found)
    assert found.turns == 3


@pytest.mark.parametrize(
    "said",
    [f"<tool_call>{'[' * 99_000}{']' * 99_000}</tool_call>", call("look", "[" * 99_000)],
    ids=["call", "arguments"],
)
def test_a_call_that_nests_without_end_is_no_json(
    words: Any, config: AgentConfig, said: str
) -> None:
    form = ChatTemplate(["look"], words, {}, lambda text: [], lambda tokens: said)
    (error,) = form.calls([])
    assert isinstance(error, ToolError)
    assert "no JSON" in str(error)


@pytest.mark.parametrize("ends", ["", "</tool_call>", "</think>"])
def test_marks_without_an_end_take_time_in_proportion(words: Any, ends: str) -> None:
    marks = ends + "<tool_call>" * 16_000
    form = ChatTemplate(["look"], words, {}, lambda text: [], lambda tokens: marks)
    began = time.process_time()
    assert form.calls([]) == []
    assert time.process_time() - began < 2  # else a quarter of a minute: each looks for its end


def test_no_more_calls_of_a_turn_are_made_than_the_recipe_says(
    words: Any, config: AgentConfig
) -> None:
    most = config.model_copy(update={"max_calls": 2})
    calls = "".join(call("calc", {"expression": f"{n}+1"}) for n in range(4))
    shown = text(words, talked(words, most, calls, "end"))
    assert "<tool_response>1</tool_response><tool_response>2</tool_response>" in shown
    assert "<tool_response>3</tool_response>" not in shown
    assert shown.count("too many calls") == 2


@pytest.mark.parametrize(
    ("said", "reply"),
    [
        ("<tool_call>look</tool_call>", "error: the call is no JSON"),
        ("<tool_call>[1]</tool_call>", "error: a call is"),
        (call("find", {}), "error: there is no tool find; there are: calc, look"),
        (call("look", {"words": "a"}), "error: missing a required argument: 'word'"),
        (call("look", {"word": "a", "joined": "b"}), "a"),
        (call("look", [1]), "error: the arguments are no object"),
        (call("look", '{"word": "a"}'), "a"),
        (call("look", "word"), "error: the arguments are no JSON"),
        (call("calc", {"e": "1/0"}), "error: division by zero"),
    ],
)
def test_what_is_said_to_odd_calls(words: Any, config: AgentConfig, said: str, reply: str) -> None:
    shown = text(words, talked(words, config, said, "end"))
    wanted: str = words.decode(words.encode(reply, add_special_tokens=False))
    assert f"<tool_response>{wanted}" in shown


def test_calls_in_thoughts_and_halves_of_calls_are_text(words: Any, config: AgentConfig) -> None:
    thought = f"<think>{call('look', {'word': 'a'})}</think>"
    for said in (f"{thought}done", '<tool_call>{"name": "look"', "look</tool_call>"):
        assert talked(words, config, said).turns == 1
    both = talked(words, config, thought + call("look", {"word": "b"}), "end")
    assert "<user><tool_response>b</tool_response><eos>" in text(words, both)


@pytest.mark.parametrize(
    ("said", "made", "begun"),
    [
        ("x</think>y{mark}", 1, ""),
        ("{mark}", 1, ""),
        ("<think>x</think>{mark}{plain}", 2, ""),
        ("{plain}<think>{plain}</think>{mark}", 2, ""),
        ("{plain}<think>{plain}", 1, ""),
        ("<think>{plain}", 0, ""),
        ("{plain}</think>{plain}{plain}", 2, ""),
        ("<tool_call> or not </think>{plain}", 1, "<think>"),
        ("{plain}", 0, "<think>"),
        ("<think>x</think>{plain}", 1, "<think>"),
        ("{plain}", 1, "<think></think>"),
    ],
)
def test_calls_are_made_outside_thoughts_alone(
    words: Any, said: str, made: int, begun: str
) -> None:
    filled = said.format(
        mark=call("look", {"word": "</think>"}), plain=call("look", {"word": "<think>"})
    )
    form = ChatTemplate(["look"], words, {"mood": begun}, lambda text: [], lambda tokens: filled)
    calls = form.calls([])
    assert len(calls) == made
    assert all(isinstance(each, Call) for each in calls)


def test_values_reach_tools_that_take_a_text() -> None:
    class Echo(Tool):
        def call(self, arguments: str) -> str:
            return arguments

    assert Echo().call_by_names({"query": "a b"}) == "a b"
    assert Echo().call_by_names({"query": 3}) == '{"query": 3}'
    assert Echo().call_by_names({"a": "é", "b": [1]}) == '{"a": "é", "b": [1]}'


def test_a_template_without_tools_is_refused_at_once(words: Any, config: AgentConfig) -> None:
    own = words.chat_template
    for template in (
        "{{ raise_exception('only user and assistant') }}",
        "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
    ):
        words.chat_template = template
        try:
            with pytest.raises(ConfigError, match=r"no messages of the role `tool`") as refused:
                ToolUse(config, words)
        finally:
            words.chat_template = own
        assert refused.value.key == "rollout.agent.calls"


def test_functions_are_called_in_the_form_or_refused_at_once(
    words: Any, config: AgentConfig
) -> None:
    function = config.tools["look"].function.replace(":look", ":add")
    add = {"type": "function", "function": function}
    by_names = AgentConfig(calls="chat_template", tools={"add": add})
    found = talked(words, by_names, call("add", {"a": 2, "b": 3}), "end")
    assert "<tool_response>5</tool_response>" in text(words, found)
    with pytest.raises(ConfigError, match=r"add.* cannot be called as add\(…\)") as refused:
        ToolUse(AgentConfig(tools={"add": add}), words)
    assert refused.value.key == "rollout.agent.tools.add.function"
    for wrong in ({**add, "options": {"c": 1}}, {**add, "function": function + "_"}):
        with pytest.raises(ConfigError, match=r"cannot be called|has no function"):
            ToolUse(AgentConfig(calls="chat_template", tools={"add": wrong}), words)
    later = {**add, "function": function.replace(":add", ":later")}
    with pytest.raises(ConfigError, match="is `async`"):
        ToolUse(AgentConfig(calls="chat_template", tools={"later": later}), words)


def test_names_and_tags_follow_the_form() -> None:
    calculator = {"type": "calculator"}
    assert AgentConfig(calls="chat_template", tools={"webSearch.find-all": calculator})
    with pytest.raises(ValidationError, match="cannot be the name of a tool"):
        AgentConfig(calls="chat_template", tools={"a b": calculator})
    with pytest.raises(ValidationError, match="has no effect without calls: tags"):
        AgentConfig(calls="chat_template", tools={"calc": calculator}, reply="<a>{}</a>")


def test_replies_between_tags_of_ones_own(words: Any) -> None:
    config = AgentConfig(
        tools={"calc": {"type": "calculator"}}, reply="<tool_response>{}</tool_response>"
    )
    assert config.whole == ("<calc>", "</calc>", "<tool_response>", "</tool_response>")
    use = ToolUse(config, words)
    turn = words.encode("so <calc>1+1</calc>", add_special_tokens=False)
    reply = use.reply(turn, use.calls(turn)).tokens()
    assert words.decode(reply.tolist()) == "<tool_response>2</tool_response>"
