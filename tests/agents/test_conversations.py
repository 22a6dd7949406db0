"""Conversations with tools: which tokens are the model's, what tools reply, and how they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from rlinf.agents.conversations import Conversations
from rlinf.agents.tool import AgentConfig
from rlinf.agents.tool_use import ToolUse
from rlinf.data.sequences import Completion, PromptGroup, Score, assemble_sequences
from rlinf.engines.config import SamplingConfig
from rlinf.engines.protocol import FinishedCompletion, GenerationRequest
from rlinf.errors import RunFailure

from .support import CALCULATOR, ScriptedEngine, array, calls_of, tokenizer

AT_ONCE = CALCULATOR.model_copy(update={"max_calls_at_once": 4})


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Talk:
    """Scripted conversations; what the model says is written as texts of its turns."""

    def __init__(self, words: Any, *said: str, config: AgentConfig = CALCULATOR, **limits: Any):
        self.words = words
        self.said = [[*self.encode(text), words.eos_token_id] for text in said]
        self.engine = ScriptedEngine(dict(enumerate(self.said)), words.eos_token_id)
        limits = {"max_turns": config.max_turns, **limits}
        self.use = ToolUse(config, words)
        self.conversations = Conversations(self.engine, self.use, **limits)

    def let_tool(self, function: Callable[[str], Any]) -> None:
        """Have the tool do what a function does."""
        self.use._tools["calc"] = calls_of("calc", function, seconds=10)

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.words.encode(text, add_special_tokens=False)
        return found

    def requests(self, prompt: str = "12+34=", longest: int = 100) -> list[GenerationRequest]:
        sampling = SamplingConfig(max_new_tokens=longest)
        tokens = array(self.encode(prompt))
        return [
            GenerationRequest(request_id=n, prompt_tokens=tokens, seed=n, sampling=sampling)
            for n in range(len(self.said))
        ]

    def ended(self, **limits: Any) -> list[Completion]:
        found = self.conversations.generate(self.requests(**limits))
        assert self.conversations.unfinished == self.engine.unfinished == 0
        return [item.completion for item in found]

    def text(self, completion: Completion) -> str:
        found: str = self.words.decode(completion.tokens.tolist())
        return found


def test_two_turns_with_exact_masks(words: Any) -> None:
    talk = Talk(words, "<calc>12+34</calc><answer>46</answer>", "<answer>46</answer>")
    with_tool, without = talk.ended()
    call, reply = talk.encode("<calc>12+34</calc>"), talk.encode("<result>46</result>")
    rest = [*talk.encode("<answer>46</answer>"), words.eos_token_id]
    assert with_tool.tokens.tolist() == call + reply + rest
    assert with_tool.mask.tolist() == [True] * 7 + [False] * 4 + [True] * 5
    own = [-float(token) for token in call + rest]
    assert with_tool.log_probs[with_tool.mask].tolist() == own
    assert not with_tool.log_probs[~with_tool.mask].any()
    assert with_tool.sampled_tokens.tolist() == call + rest
    assert (with_tool.turns, with_tool.turn_start, with_tool.stop_reason) == (2, 11, "stop")
    assert without.tokens.tolist() == rest
    assert without.sampled is None
    assert without.turns == 1


def test_a_batch_trains_on_sampled_tokens_and_attends_to_replies(words: Any) -> None:
    talk = Talk(words, "<calc>12+34</calc><answer>46</answer>", "<answer>46</answer>")
    completions = tuple(talk.ended())
    group = PromptGroup(
        prompt_id=0,
        draw=0,
        prompt_tokens=talk.requests()[0].prompt_tokens,
        answer="46",
        completions=completions,
        scores=(Score(reward=1.0), Score(reward=0.0)),
    )
    arrays = assemble_sequences([group], pad_id=0)
    assert arrays["mask"].tolist() == [[1] * 7 + [0] * 4 + [1] * 5, [1] * 5 + [0] * 11]
    prompt = len(group.prompt_tokens)
    assert arrays["attention_mask"][0].all()
    assert arrays["attention_mask"][1].sum() == prompt + 5
    assert arrays["input_ids"][0, prompt:].tolist() == completions[0].tokens.tolist()


def test_a_turn_goes_on_behind_the_tokens_that_were_sampled(words: Any) -> None:
    """What is decoded to the same text by other tokens is never put in their place."""
    odd = [words.convert_tokens_to_ids(word) for word in ("<calc>", "1", "+", "1", "</calc>")]
    talk = Talk(words, "")
    talk.said[0][:] = [*odd, words.unk_token_id, words.eos_token_id]
    (found,) = talk.ended()
    second = talk.engine.taken[1].partial
    assert second is not None
    assert second.tokens.tolist() == odd + talk.encode("<result>2</result>")
    assert found.tokens[: len(second)].tolist() == second.tokens.tolist()


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        ("<calc>1/0</calc>", "<result>error: division by zero</result>"),
        ("<calc>hello</calc>", "<result>error: not an expression</result>"),
        ("<calc></calc>", "<result>error: not an expression</result>"),
        ("12+34</calc>", "<result>error: call without a beginning</result>"),
        ("<calc>5<calc>2*3</calc>", "<result>6</result>"),
        ("so <calc>7-9</calc>", "<result>-2</result>"),
    ],
)
def test_replies_to_calls(words: Any, call: str, reply: str) -> None:
    talk = Talk(words, f"{call}<answer>0</answer>")
    (found,) = talk.ended()
    assert talk.text(found) == f"{call}{reply}<answer>0</answer><eos>"


def test_a_call_before_this_turn_is_no_call(words: Any) -> None:
    talk = Talk(words, "<calc>1+1</calc>3</calc><answer>2</answer>")
    (found,) = talk.ended()
    assert "<result>error: call without a beginning</result><answer>" in talk.text(found)


def test_turns_are_bounded(words: Any) -> None:
    talk, asked = Talk(words, "<calc>1+1</calc>" * 9, max_turns=3), []
    talk.let_tool(lambda arguments: asked.append(arguments) or "2")
    (found,) = talk.ended()
    assert asked == ["1+1"] * 2  # nobody reads a reply to the last one
    assert talk.text(found) == "<calc>1+1</calc><result>2</result>" * 2 + "<calc>1+1</calc>"
    assert found.truncated
    assert found.turns == 3


def test_a_reply_that_leaves_no_token_ends_the_answer(words: Any) -> None:
    call, reply = 6, 3
    for longest, turns in ((call + reply, 1), (call + reply + 1, 2)):
        talk = Talk(words, "<calc>1+12</calc><answer>2</answer>", "<answer>2</answer>")
        found, _ = talk.ended(longest=longest + 1)
        assert found.turns == turns
        assert found.truncated
        assert len(found) <= longest + 1


def test_a_long_turn_ends_the_answer(words: Any) -> None:
    talk = Talk(words, "<calc>1+1</calc>" + "9" * 20, max_turn_tokens=8)
    (found,) = talk.ended()
    assert talk.text(found) == "<calc>1+1</calc><result>2</result>" + "9" * 8
    assert found.truncated


@pytest.mark.parametrize("steps", [9, 12])
def test_a_long_turn_that_was_interrupted_ends_where_it_would_have(words: Any, steps: int) -> None:
    def talk() -> Talk:
        return Talk(words, "<calc>1+1</calc>" + "9" * 20, max_turn_tokens=8)

    (whole,), first, second = talk().ended(), talk(), talk()
    first.conversations.submit(first.requests()[0])
    for _ in range(steps):
        first.conversations.step()
    (part,) = first.conversations.abort()
    second.conversations.submit(replace(second.requests()[0], partial=part.completion))
    ended: list[FinishedCompletion] = []
    while not ended:
        ended = second.conversations.step()
    assert ended[0].completion.tokens.tolist() == whole.tokens.tolist()
    assert ended[0].completion.truncated


def test_long_replies_are_cut_off(words: Any) -> None:
    short = CALCULATOR.model_copy(update={"max_reply_tokens": 3})
    talk = Talk(words, "<calc>123*456</calc><answer>1</answer>", config=short)
    (found,) = talk.ended()
    assert "<result>560</result>" in talk.text(found)


def test_a_reply_stands_in_the_form_that_the_model_knows(words: Any) -> None:
    form = "<eos>:tool: {}<result>"
    own = AgentConfig(tools=CALCULATOR.tools, reply=form)
    talk = Talk(words, "<calc>1+1</calc><answer>2</answer>", config=own)
    (found,) = talk.ended()
    given = form.replace("{}", "2")
    assert talk.text(found) == f"<calc>1+1</calc>{given}<answer>2</answer><eos>"
    call, reply = talk.encode("<calc>1+1</calc>"), talk.encode(given)
    mask = [True] * len(call) + [False] * len(reply)
    assert found.mask.tolist()[: len(mask)] == mask
    assert all(found.mask[len(mask) :])


def replied(words: Any, folder: Path, body: str) -> Any:
    """The tokens that follow a call of a function with this body."""
    file = folder / "own.py"
    file.write_text(
        f"from rlinf.agents.tool import ToolError\n\ndef reply(arguments):\n    {body}\n"
    )
    section = {"type": "function", "function": f"{file}:reply"}
    config = AgentConfig(tools={"calc": section}, max_reply_tokens=8)
    found = following(ToolUse(config, words), words.encode("<calc>1</calc>"))
    assert found is not None
    return found


def following(use: ToolUse, turn: list[int]) -> np.ndarray | None:
    """The tokens that follow a turn."""
    calls = use.calls(turn)
    return use.reply(turn, calls).tokens() if calls else None


@pytest.mark.parametrize("body", [r"return '1\ud83d2'", r"raise ToolError('1\ud83d2')"])
def test_half_a_character_in_a_reply_is_none(words: Any, tmp_path: Path, body: str) -> None:
    text = words.decode(replied(words, tmp_path, body).tolist())
    assert text in ("<result>1<unk>2</result>", "<result>error: 1</result>")


def test_the_end_mark_in_a_reply_is_text(words: Any, tmp_path: Path) -> None:
    reply = replied(words, tmp_path, "return '1<eos>2'")
    assert words.eos_token_id not in reply
    # The same tokenizer goes on to read the mark where the model says it.
    assert words.encode("<eos>") == [words.eos_token_id]


def test_of_a_reply_without_end_the_beginning_is_tokenised(words: Any, tmp_path: Path) -> None:
    read: list[int] = []

    class Counting:
        def encode(self, text: str, **options: Any) -> Any:
            read.append(len(text))
            return words.encode(text, **options)

        decode = staticmethod(words.decode)

    reply = replied(Counting(), tmp_path, "return '12' * 1_000_000")
    assert words.decode(reply.tolist()) == "<result>12121212</result>"
    assert max(read) <= 64 * 8


def test_calls_end_by_text_where_their_marks_are_no_tokens(tmp_path: Path) -> None:
    from rlinf.data.tokenizer import train_tokenizer

    plain = train_tokenizer(["0123456789+<>/calcresulta: bdenorviy"], tmp_path)
    use = ToolUse(CALCULATOR, plain)
    assert use.stop == ("</calc>",)
    assert use.turn_ends == ()
    reply = following(use, plain.encode("<calc>5+6</calc>"))
    assert reply is not None
    assert plain.decode(reply.tolist()) == "<result>11</result>"
    assert following(use, plain.encode("<calc>5+6</calc> and")) is None
    talk = Talk(plain, "<calc>5+6</calc>")
    talk.conversations.submit(talk.requests()[0])
    assert talk.engine.taken[0].sampling.stop == ("</calc>",)


@pytest.mark.parametrize("config", [CALCULATOR, AT_ONCE], ids=["one call", "several calls"])
@pytest.mark.parametrize("steps", range(1, 16))
def test_interrupted_anywhere_it_goes_on_to_the_same(
    words: Any, steps: int, config: AgentConfig
) -> None:
    said = ("<calc>12+34</calc><calc>46*2</calc><answer>92</answer>", "<calc>1</calc>0")
    whole = Talk(words, *said).ended()
    first = Talk(words, *said, config=config)
    for request in first.requests():
        first.conversations.submit(request)
    ended: dict[int, Completion] = {}

    def note(items: list[FinishedCompletion]) -> None:
        ended.update((item.request_id, item.completion) for item in items)

    for _ in range(steps):
        note(first.conversations.step())
    part = {item.request_id: item for item in first.conversations.abort()}
    assert first.conversations.unfinished == 0
    assert {item.completion.stop_reason for item in part.values()} <= {"abort"}
    second = Talk(words, *said, config=config)
    for request in second.requests():
        if request.request_id in part:
            begun = part[request.request_id].completion
            second.conversations.submit(replace(request, partial=begun))
    while second.conversations.unfinished:
        note(second.conversations.step())
    for number, completion in enumerate(whole):
        assert ended[number].tokens.tolist() == completion.tokens.tolist()
        assert ended[number].mask.tolist() == completion.mask.tolist()
        assert ended[number].stop_reason == completion.stop_reason


def test_answers_go_on_while_tools_of_others_are_at_work(words: Any) -> None:
    call = "<calc>1</calc><answer>0</answer>"
    talk, over = Talk(words, call, call, "<answer>5</answer>", config=AT_ONCE), threading.Event()
    talk.let_tool(lambda arguments: "7" if over.wait(10) else "late")
    for request in talk.requests():
        talk.conversations.submit(request)
    found: dict[int, Completion] = {}
    while talk.conversations.unfinished:
        assert talk.conversations.progress().keys() | found.keys() == {0, 1, 2}
        found |= {item.request_id: item.completion for item in talk.conversations.step()}
        if 2 in found:
            over.set()
    assert [talk.text(found[n]) for n in (0, 1)] == [
        "<calc>1</calc><result>7</result><answer>0</answer><eos>"
    ] * 2


@pytest.mark.parametrize("numbers", [None, [0]])
def test_an_answer_that_is_interrupted_at_a_call_takes_the_reply_along(
    words: Any, numbers: list[int] | None
) -> None:
    talk, begun = Talk(words, "<calc>1</calc>0", "5" * 20, config=AT_ONCE), threading.Event()
    talk.let_tool(lambda arguments: (begun.wait(10) and time.sleep(0.1)) or "7")
    for request in talk.requests():
        talk.conversations.submit(request)
    for _ in range(5):
        assert not talk.conversations.step()
    begun.set()
    ended = {item.request_id: item.completion for item in talk.conversations.abort(numbers)}
    assert talk.text(ended[0]) == "<calc>1</calc><result>7</result>"
    assert ended[0].stop_reason == "abort"
    assert talk.conversations.unfinished == (0 if numbers is None else 1)
    assert len(ended) == (2 if numbers is None else 1)


def test_a_tool_that_never_answers_beside_the_engine_ends_the_run(words: Any) -> None:
    talk = Talk(words, *["<calc>1</calc>0"] * 9, config=AT_ONCE)
    talk.let_tool(lambda arguments: {}["key"])
    with pytest.raises(RunFailure, match=r"KeyError: 'key'.*\(all of [89] calls\)"):
        talk.ended()


def test_a_demonstration_has_the_replies_of_the_tools(words: Any) -> None:
    use = ToolUse(CALCULATOR, words)
    tokens, sampled = use.demonstration("<calc>3*4</calc><calc>12+1</calc><answer>13</answer>")
    text = "<calc>3*4</calc><result>12</result><calc>12+1</calc><result>13</result>"
    assert words.decode(tokens) == f"{text}<answer>13</answer>"
    given = np.array(tokens)[~np.array(sampled)].tolist()
    assert words.decode(given) == "<result>12</result><result>13</result>"
    tokens, sampled = use.demonstration("<answer>1</answer>")
    assert all(sampled)
    assert use.demonstration("") == ([], [])


def test_each_turn_is_scored_as_the_request_asks(words: Any) -> None:
    for scored in (True, False):
        talk = Talk(words, "<calc>12+34</calc><answer>46</answer>")
        (request,) = talk.requests()
        talk.conversations.generate([replace(request, scored=scored)])
        assert [turn.scored for turn in talk.engine.taken] == [scored] * 2
