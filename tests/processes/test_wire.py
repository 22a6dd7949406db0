"""Messages between a process and its child."""

import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rlinf.processes.wire import Messages, decode_tree, encode_tree, send

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=30)
@given(plain, arrays.arrays(np.float32, arrays.array_shapes(min_dims=0)))
def test_what_is_read_is_what_was_written(value, array):
    found = decode_tree(encode_tree({"plain": value, "nested": [{"array": array}]}))
    assert found["plain"] == value
    assert found["nested"][0]["array"].dtype == np.float32
    np.testing.assert_array_equal(found["nested"][0]["array"], array)


def test_a_key_of_the_user_never_stands_for_an_array():
    answer = {"__array__": ["<f8", [2]], "__array___": 1}
    found = decode_tree(encode_tree({"answer": answer, "array": np.zeros(2)}))
    assert found["answer"] == answer


def test_arrays_of_records_come_back_and_are_writable():
    table = np.zeros(3, np.dtype([("seed", "<i8"), ("valid", "?")]))
    table["seed"] = [1, 2, 3]
    found = decode_tree(encode_tree({"table": table}))["table"]
    assert found.dtype == table.dtype
    found["seed"][0] = 7
    assert table["seed"][0] == 1


def test_objects_are_refused():
    with pytest.raises(TypeError, match="Python objects"):
        encode_tree({"array": np.array([object()])})


@pytest.mark.parametrize("spoilt", [b"", b"\x05\0\0\0\0\0\0\0\0\0\0\0{nope", b"\xff" * 40])
def test_what_is_no_message_is_a_value_error(spoilt):
    with pytest.raises(ValueError, match=r"no message|Expecting|codec|column|property name"):
        decode_tree(spoilt)


def test_a_long_message_arrives_whole():
    ours, theirs = socket.socketpair()
    content = np.arange(3_000_000, dtype=np.int64)
    with ours, theirs:
        sender = threading.Thread(target=send, args=(ours, {"content": content}))
        sender.start()
        messages = Messages(theirs)
        np.testing.assert_array_equal(messages.receive()["content"], content)
        assert not messages.begun
        sender.join()
        ours.close()
        with pytest.raises(EOFError):
            messages.receive()


@pytest.mark.parametrize("seconds", [None, 5.0])
def test_messages_that_come_together_are_read_one_by_one(seconds):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(seconds)
        messages, long = Messages(theirs), np.arange(1000)
        ours.sendall(encode_tree({"number": 1}) + encode_tree({"number": 2, "content": long}))
        assert messages.receive() == {"number": 1}
        assert messages.begun
        assert messages.receive()["content"].tolist() == long.tolist()
        assert not messages.begun


def test_a_message_that_does_not_come_whole_ends_at_the_limit_of_time():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(0.05)
        ours.sendall(encode_tree({"number": 1})[:-1])
        with pytest.raises(TimeoutError):
            Messages(theirs).receive()
