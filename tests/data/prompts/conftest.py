"""A tokenizer of characters, trained once."""

import json

import pytest

from rlinf.data.tokenizer import train_tokenizer

CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/=%()[]{}.,:;?!'\\$_^ \n"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return train_tokenizer([CHARACTERS], tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def write(tmp_path):
    def write(name, records):
        path = tmp_path / name
        if isinstance(records, bytes):
            path.write_bytes(records)
        else:
            path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return path

    return write


def sums(n, start=0):
    return [{"prompt": f"{i}+1=", "solutions": str(i + 1)} for i in range(start, start + n)]
