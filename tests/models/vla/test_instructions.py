"""Prompts of tasks as tokens."""

from dataclasses import replace

import pytest
import torch

from rlinf.envs.base import instruction_bytes
from rlinf.envs.spec import EnvSpec
from rlinf.errors import ConfigError
from rlinf.models.config import REGISTRY
from rlinf.models.policy import draw_noise
from rlinf.models.vla.instructions import (
    InstructionTable,
    hashed_words,
    read_tokenizer,
    refuse_unknown,
)


def _encode(text):
    return [1, *hashed_words(text, first=4, words=60000)]


def _table(*prompts, limit=9, side="left", encode=_encode):
    return InstructionTable(prompts, encode, limit=limit, side=side)


def test_padding_stands_behind_the_first_token_or_at_the_end():
    left, right = (_table("open it", "close the drawer", side=side) for side in ("left", "right"))
    assert left.ids[0].tolist() == [1, 0, *_encode("open it")[1:]]
    assert left.mask.tolist() == [[True, False, True, True], [True] * 4]
    assert right.ids[0].tolist() == [*_encode("open it"), 0]
    assert right.mask[0].tolist() == [True, True, True, False]


def test_rows_have_the_prompt_of_their_task():
    table = _table("open it", "close it")
    ids, mask = table({"task_ids": torch.tensor([1, 0, 1])})
    assert torch.equal(ids, table.ids[[1, 0, 1]])
    assert mask.all()
    alone, _ = _table("open it")({"states": torch.zeros(2, 3)})
    assert alone.tolist() == [_encode("open it")] * 2


def test_each_text_is_tokenised_once():
    seen = []
    _table("a", "b", "a", encode=lambda text: seen.append(text) or _encode(text))
    assert seen == ["a", "b"]


@pytest.mark.parametrize(
    ("prompts", "limit", "message"),
    [
        ((), 9, "does not say in words"),
        (("open the drawer",), 3, r"has 4 tokens, .* at most 3; legal with it: 4"),
    ],
)
def test_what_cannot_be_told_is_refused(prompts, limit, message):
    with pytest.raises(ConfigError, match=message):
        _table(*prompts, limit=limit)


def _instructions(*texts):
    return torch.stack([torch.from_numpy(instruction_bytes(text).copy()) for text in texts])


@pytest.mark.parametrize("side", ["left", "right"])
def test_instructions_among_observations_are_read_row_by_row(side):
    seen = []
    table = InstructionTable(
        (), lambda text: seen.append(text) or _encode(text),
        limit=6, side=side, free=lambda text: f"do {text}",
    )  # fmt: skip
    given = _instructions("open it", "close it now", "open it")
    seen.clear()
    ids, mask = table({"instruction": given})
    assert seen == ["do open it", "do close it now"]
    told = [_encode(f"do {text}") for text in ("open it", "close it now", "open it")]
    assert [row[there].tolist() for row, there in zip(ids, mask, strict=True)] == told
    assert ids.shape == (3, 6)  # whatever the texts of a batch
    with pytest.raises(ConfigError, match=r"has 9 tokens.* at most 6; legal with it: 9 or more"):
        table({"instruction": _instructions("what is more than the model reads")})


def test_a_token_beyond_the_vocabulary_is_refused_whenever_it_is_read():
    words = {"open": 5, "close": 900}
    table = InstructionTable(
        (), lambda text: [1, *(words.get(word, 6) for word in text.split())], limit=6, free=str
    )
    table({"instruction": _instructions("close it")})
    refuse_unknown(torch.nn.ModuleList([table]), 100)
    ids, _ = table({"instruction": _instructions("open it", "")})
    assert ids.max() == 6
    told = r"^model\.tokenizer: .* gives token 900 for 'close the door', the model has 100; nearest"
    with pytest.raises(ConfigError, match=told):
        table({"instruction": _instructions("open it", "close the door")})
    with pytest.raises(ConfigError, match=told):  # as the server asks
        table.tokens_of("close the door")
    with pytest.raises(ConfigError, match="gives token 6, the model has 6"):
        refuse_unknown(table, 6)


SHOWN = EnvSpec(
    observation_shapes={"main_images": (32, 32, 3), "states": (3,)},
    observation_dtypes={"main_images": "uint8", "states": "float32"},
    action_kind="continuous",
    action_dim=2,
    action_low=(-1.0, -1.0),
    action_high=(1.0, 1.0),
    task_descriptions=("open the drawer", "close the large drawer quickly"),
    max_episode_steps=8,
)
DENOISING = ("pi0", "pi05", "smolvla", "gr00t", "wall_oss")


@pytest.mark.parametrize("kind", [*DENOISING, "openvla", "openvla_oft", "qwen_vl"])
def test_policies_read_the_same_from_a_table_and_from_observations(kind):
    pytest.importorskip("transformers")
    steps = {"denoising_steps": 2} if kind in DENOISING else {}
    config = REGISTRY.load(kind)(preset="tiny", num_action_chunks=1, value_head=(4,), **steps)
    anew = replace(
        SHOWN,
        task_descriptions=(),
        observation_shapes={**SHOWN.observation_shapes, "instruction": (256,)},
        observation_dtypes={**SHOWN.observation_dtypes, "instruction": "uint8"},
    )
    known = replace(
        SHOWN,
        observation_shapes={**SHOWN.observation_shapes, "task_ids": ()},
        observation_dtypes={**SHOWN.observation_dtypes, "task_ids": "int64"},
    )
    generator = torch.Generator().manual_seed(3)
    rows = {
        "main_images": torch.randint(0, 256, (1, 32, 32, 3), generator=generator).byte(),
        "states": torch.randn(1, 3, generator=generator),
    }
    rows = {name: each.expand(2, *each.shape[1:]) for name, each in rows.items()}
    texts = SHOWN.task_descriptions
    found = []
    for spec, told in (
        (known, {"task_ids": torch.tensor([0, 1])}),
        (anew, {"instruction": _instructions(*texts)}),
    ):
        policy = config.build(spec, value_dim=1, seed=0)
        found.append(evaluated(policy, rows | told))
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=1e-4)
    assert not torch.allclose(found[1][0], found[1][1], atol=1e-4)


def evaluated(policy, inputs):
    """What recorded actions are worth to it, [B, ...], which depends on what it reads."""
    count = len(inputs["states"])
    noise = draw_noise(policy.imitation_noise, (count,), torch.Generator().manual_seed(1))
    noise = {name: each[:1].expand_as(each) for name, each in noise.items()}
    with torch.no_grad():
        return policy.imitation_errors(
            inputs | noise | {"raw_actions": torch.full((count, 1, 2), 0.25)}
        )


def test_tasks_that_read_the_same_are_refused():
    with pytest.raises(ConfigError, match="two tasks the same tokens"):
        _table("open", "close", encode=lambda text: [1, 2])


def test_a_tokenizer_is_read_from_its_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"<unk>": 0, "<s>": 1, "open": 5}, unk_token="<unk>")
    made = tokenizers.Tokenizer(words)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    assert read_tokenizer(tmp_path).encode("open").ids == [1, 5]
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in"):
        read_tokenizer(tmp_path / "other")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer"):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("kind", "word"),
    [("gr00t", "<IMG_CONTEXT>"), ("wall_oss", "<|image_pad|>"), ("wall_oss", "<|propri|>")],
)
def test_no_instruction_stands_for_a_picture(kind, word):
    config = REGISTRY.load(kind)(preset="tiny", num_action_chunks=1, denoising_steps=2)
    told = replace(SHOWN, task_descriptions=("open it", f"open {word} it"))
    with pytest.raises(ConfigError, match=r"in whose place the model reads a picture"):
        config.build(told, seed=0)
    anew = replace(
        SHOWN,
        task_descriptions=(),
        observation_shapes={**SHOWN.observation_shapes, "instruction": (256,)},
        observation_dtypes={**SHOWN.observation_dtypes, "instruction": "uint8"},
    )
    policy = config.build(anew, seed=0)
    rows = {
        "main_images": torch.zeros(2, 32, 32, 3, dtype=torch.uint8),
        "states": torch.zeros(2, 3),
    }
    policy.sample(rows | {"instruction": _instructions("open it", "close it")}, None)
    with pytest.raises(ConfigError, match=r"in whose place the model reads a picture"):
        policy.sample(rows | {"instruction": _instructions("open it", f"close {word} it")}, None)
    prompts = [part for part in policy.modules() if isinstance(part, InstructionTable)]
    with pytest.raises(ConfigError, match=r"in whose place the model reads a picture"):
        prompts[0].tokens_of(f"close {word} it")
