"""What a policy must not see is refused in one line that says what would be legal."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from rlinf.envs.base import INSTRUCTION_KEY, INSTRUCTION_SHAPE, instruction_bytes, instruction_text
from rlinf.errors import ConfigError
from rlinf.serving.requests import RefusedRequestError, RequestReader
from rlinf.serving.wire import WireError, pack, unpack

from .support import SPEC, TASKS, observation


def few_words(text: str) -> None:
    if len(text.split()) > 3:
        raise RefusedRequestError("more than 3 words")


def reader(spec=SPEC, keys=None, continues=False) -> RequestReader:
    return RequestReader(
        spec, chunk=4, keys=keys or {}, continues=continues, check_instruction=few_words
    )


def given(**changed: Any) -> dict[str, Any]:
    found = observation(0) | changed
    return {name: value for name, value in found.items() if value is not None}


PICTURE = observation(0)["main_images"]
BAD: list[tuple[Any, list[str]]] = [
    ([1, 2], ["a mapping", "list"]),
    ({1: 2}, ["a name is a text", "int"]),
    (unpack(b"\x81\xa1a" * 600 + b"\x01"), ["more than 8 deep"]),
    (given(main_images=None), ["`main_images` is missing: uint8 [16, 12, 3]", "states"]),
    (given(states=None), ["`states` is missing: float32 [5]"]),
    (given(states=np.zeros(6, np.float32)), ["`states` is [6]; legal: [5]"]),
    (given(states=np.zeros((1, 5), np.float32)), ["[1, 5]; legal: [5]"]),
    (given(states=np.zeros(5, np.int64)), ["type int64; legal: float32"]),
    (given(states=[0.0] * 5), ["is list, not an array of float32 [5]"]),
    (given(states=np.array([0, 1, np.nan, 0, 0])), ["no finite number, first at [2]"]),
    (given(states=np.array([0, 1, 2, 3, 1e300])), ["no finite number, first at [4]"]),
    (given(main_images=PICTURE / 255), ["type float64; legal: uint8 (0 to 255)"]),
    (given(main_images=PICTURE.astype(np.int64)), ["type int64; legal: uint8"]),
    (given(main_images=PICTURE.transpose(2, 0, 1)), ["channels come first, they must come last"]),
    (given(main_images=PICTURE[:8]), ["`main_images` is [8, 12, 3]; legal: [16, 12, 3]"]),
    (given(wrist_image=PICTURE), ["reads no `wrist_image`", "--key wrist_image=NAME"]),
    (given(main_image=PICTURE), ["did you mean `main_images`?"]),
    (given(cameras={"front": PICTURE}), ["reads no `cameras/front`"]),
    (given(prompt=None), ["`prompt` is missing", "Open the drawer. | Close the drawer."]),
    (given(prompt=3), ["`prompt` is int, not a text"]),
    (given(prompt="open a drawer"), ["is no task", "did you mean `Open the drawer.`?"]),
    (given(prompt="sing"), ["known: Close the drawer., Open the drawer., Reach the red ball."]),
    (given(task_ids=np.int64(1)), ["`prompt` and `task_ids` say the same"]),
    (given(prompt=None, task_ids=3), ["`task_ids` is 3; legal: 0 to 2"]),
    (given(prefix=np.zeros((2, 3), np.float32)), ["continues no chunk"]),
    ({"batch": []}, ["has 0 observations; legal: 1 to 1024"]),
    ({"batch": [given(), given(states=None)]}, ["observation 1 of the batch: `states` is missing"]),
    ({"batch": [3]}, ["observation 0 of the batch: is no mapping"]),
    ({"batch": given()}, ["a list of observations"]),
]


@pytest.mark.parametrize(("message", "told"), BAD, ids=lambda each: str(each)[:40])
def test_bad_requests_are_refused_in_one_line(message: Any, told: list[str]) -> None:
    with pytest.raises(RefusedRequestError) as caught:
        reader().read(message)
    text = str(caught.value)
    assert "\n" not in text
    for words in told:
        assert words in text, text


def test_a_part_of_the_states_is_told_where_it_belongs() -> None:
    spec = replace(SPEC, state_parts=(("goal", 3), ("robot.tcp", 2)))
    told = r"`robot/tcp` is a part of `states` \[5\]: send as .*, goal \[3\], robot.tcp \[2\]$"
    with pytest.raises(RefusedRequestError, match=told):
        reader(spec).read(given(states=None, robot={"tcp": np.zeros(2)}))


def test_what_is_read_is_what_was_given() -> None:
    request = reader().read(given(states=np.arange(5.0), prompt="  CLOSE the drawer . "))
    assert request.single
    assert request.count == 1
    assert request.observations["states"].dtype == np.float32
    np.testing.assert_array_equal(request.observations["states"], [[0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(request.observations["task_ids"], [1])
    np.testing.assert_array_equal(request.observations["main_images"], PICTURE[None])
    rows = [given(prompt=text) for text in TASKS]
    together = reader().read({"batch": rows})
    assert (together.count, together.single) == (3, False)
    np.testing.assert_array_equal(together.observations["task_ids"], [0, 1, 2])


def test_names_of_clients_are_mapped() -> None:
    keys = {"observation/image": "main_images", "observation/state": "states", "time": ""}
    theirs = {
        "observation/image": PICTURE,
        "observation": {"state": np.zeros(5)},
        "prompt": TASKS[0],
        "time": 3.0,
    }
    found = reader(keys=keys).read(theirs)
    assert set(found.observations) == {"states", "main_images", "task_ids"}
    with pytest.raises(RefusedRequestError, match="`main_images` is given twice"):
        reader(keys=keys).read(theirs | {"main_images": PICTURE})
    with pytest.raises(ConfigError, match="reads no `main_image`; did you mean `main_images`"):
        reader(keys={"image": "main_image"})
    with pytest.raises(ConfigError, match="two names are given for `states`"):
        reader(keys={"a": "states", "b": "states"})


def test_a_policy_of_one_task_needs_no_text_and_takes_its_own() -> None:
    shapes = {"states": (5,)}
    one = replace(SPEC, observation_shapes=shapes, task_descriptions=TASKS[:1])
    row = {"states": np.zeros(5, np.float32)}
    assert set(reader(one).read(row).observations) == {"states"}
    assert set(reader(one).read(row | {"prompt": "open the drawer"}).observations) == {"states"}
    with pytest.raises(RefusedRequestError, match="is no task of the policy"):
        reader(one).read(row | {"prompt": TASKS[1]})
    none = replace(one, task_descriptions=())
    with pytest.raises(RefusedRequestError, match="knows no texts"):
        reader(none).read(row | {"prompt": "anything"})
    assert reader(none, {"prompt": ""}).read(row | {"prompt": "anything"}).count == 1
    with pytest.raises(RefusedRequestError, match="reads no `image`; known: states; rename"):
        reader(none).read(row | {"image": PICTURE})
    with pytest.raises(ConfigError, match="reads no `prompt`; known: states"):
        reader(none, {"text": "prompt"})


@pytest.mark.parametrize(
    ("prefix", "weights", "told"),
    [
        (np.zeros((2, 3)), None, "go together"),
        (np.zeros((5, 3)), np.ones(5), "n from 1 to 4"),
        ([[0.0], [0.0, 1.0]], np.ones(2), "n from 1 to 4"),
        (np.zeros((2, 2)), np.ones(2), "legal: [2, 3]"),
        (np.zeros((2, 3)), np.ones(3), "legal: [2]"),
        (np.zeros((2, 3)), np.array([1.0, 1.5]), "lie in [0, 1]"),
        (np.full((2, 3), np.inf), np.ones(2), "no finite number"),
    ],
)
def test_bad_prefixes_are_refused(prefix: Any, weights: Any, told: str) -> None:
    extra = {"prefix": prefix} | ({} if weights is None else {"prefix_weights": weights})
    with pytest.raises(RefusedRequestError) as caught:
        reader(continues=True).read(given() | extra)
    assert told in str(caught.value)


def test_a_batch_has_no_prefixes() -> None:
    extra = {"prefix": np.zeros((2, 3), np.float32), "prefix_weights": np.ones(2, np.float32)}
    told = "observation 0 of the batch: `prefix` and `prefix_weights` go with an observation that"
    with pytest.raises(RefusedRequestError, match=told):
        reader(continues=True).read({"batch": [given() | extra]})
    with pytest.raises(RefusedRequestError, match="the policy continues no chunk"):
        reader().read({"batch": [given() | extra]})


def test_messages_are_those_of_openpi() -> None:
    message = {
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "b": {"c": np.float32(0.5)},
        "d": "e",
    }
    found = unpack(pack(message))
    np.testing.assert_array_equal(found["a"], message["a"])
    assert found["a"].dtype == np.int16
    assert found["b"]["c"] == np.float32(0.5)
    assert isinstance(found["b"]["c"], np.float32)
    plain = msgpack.unpackb(pack({"a": np.zeros((1, 2), np.uint8)}))
    assert plain["a"] == {b"__ndarray__": True, b"data": b"\0\0", b"dtype": "|u1", b"shape": [1, 2]}
    theirs = pytest.importorskip("openpi_client.msgpack_numpy")
    np.testing.assert_array_equal(theirs.unpackb(pack(message))["a"], message["a"])
    np.testing.assert_array_equal(unpack(theirs.packb(message))["a"], message["a"])


def array(**changed: Any) -> bytes:
    plain = {"__ndarray__": True, "data": b"\0" * 4, "dtype": "<f4", "shape": [1]} | changed
    return bytes(msgpack.packb({key.encode(): value for key, value in plain.items()}))


NO_MESSAGES = [
    b"",
    b"\xc1",
    b"hello",
    pack({})[:-1] + b"\x81",
    *(array(dtype=kind) for kind in ("O", "|V4", "zzz", "(1", "f4,", "<f16777216", None)),
    msgpack.packb({b"__npgeneric__": True, b"data": 1 << 60, b"dtype": "|i1"}),
    msgpack.packb({b"__npgeneric__": True, b"data": 5, b"dtype": "|S1"}),
    msgpack.packb({b"__npgeneric__": True, b"data": [5], b"dtype": "<U1"}),
    *(array(shape=shape) for shape in ([7], [0], [-1], [-1, -1], [2**40, 2**40], None)),
    array(data="text"),
]


@pytest.mark.parametrize("data", NO_MESSAGES, ids=range(len(NO_MESSAGES)))
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(WireError) as caught:
        unpack(data)
    assert "\n" not in str(caught.value)


def test_what_does_not_travel_is_refused() -> None:
    for value in (object(), np.array([None]), {"a": {1, 2}}):
        with pytest.raises(WireError, match="cannot be sent"):
            pack(value)


def test_the_client_needs_no_torch() -> None:
    program = "import sys, rlinf.serving.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_any_prompt_reaches_a_policy_that_reads_instructions() -> None:
    shapes = {name: shape for name, shape in SPEC.observation_shapes.items() if name != "task_ids"}
    types = {name: SPEC.observation_dtypes[name] for name in shapes}
    spec = replace(
        SPEC,
        task_descriptions=(),
        observation_shapes={**shapes, INSTRUCTION_KEY: INSTRUCTION_SHAPE},
        observation_dtypes={**types, INSTRUCTION_KEY: "uint8"},
    )
    row = {name: each for name, each in observation(0).items() if name in shapes}
    found = reader(spec).read(row | {"prompt": "whatever comes"}).observations[INSTRUCTION_KEY][0]
    assert instruction_text(found) == "whatever comes"
    with pytest.raises(RefusedRequestError, match="has 300 bytes; legal: 256 or fewer"):
        reader(spec).read(row | {"prompt": "x" * 300})
    with pytest.raises(RefusedRequestError, match="`prompt` is missing: what is to be done"):
        reader(spec).read(row)
    for key, long in (("prompt", "a b c d"), ("instruction", instruction_bytes("a b c d"))):
        with pytest.raises(RefusedRequestError, match="more than 3 words"):
            reader(spec).read(row | {key: long})
    with pytest.raises(RefusedRequestError, match="observation 1 of the batch: more than 3 words"):
        reader(spec).read({"batch": [row | {"prompt": text} for text in ("a", "a b c d")]})
    with pytest.raises(RefusedRequestError, match=r"`instruction` is no UTF-8 .*nearest: `prompt`"):
        reader(spec).read(row | {"instruction": np.full(INSTRUCTION_SHAPE, 255, np.uint8)})
