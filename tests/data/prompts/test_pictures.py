"""Prompt sets with pictures: what is read, where pictures go, and what is refused."""

import base64
import io
import json

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from PIL import Image

from rlinf.config.validate import validate
from rlinf.data.pictures import (
    BEGIN,
    END,
    PLACE,
    VISION_TOKENS,
    Picture,
    PictureReader,
    copy_settings,
    places_of,
    write_settings,
)
from rlinf.data.prompts.config import PromptDataConfig
from rlinf.data.tasks import SquaresTask
from rlinf.data.text_examples import TextExamplesConfig
from rlinf.data.tokenizer import train_tokenizer
from rlinf.errors import ConfigError

from .conftest import CHARACTERS

RUN = {count: BEGIN + PLACE * count + END for count in (1, 2, 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    train_tokenizer([CHARACTERS], folder, whole=VISION_TOKENS)
    write_settings(folder, patch_size=4)  # squares of 8 pixels
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    from rlinf.data.tokenizer import load_tokenizer

    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def reader(folder, tokenizer):
    return PictureReader(folder, tokenizer)


def picture(width=16, height=8, kind="PNG", seed=0):
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, kind)
    return file.getvalue()


def build(tokenizer, reader, path, *, files=None, **rest):
    section = {"train": [str(path)], "image_key": "images", **(files or {})}
    config = validate(PromptDataConfig, {"files": section, **rest}, "test")
    config.check()
    assert config.has_pictures
    return config.build(tokenizer, reader).train


def record(images, prompt="what?"):
    return {"prompt": prompt, "solutions": "1", "images": images}


def test_a_picture_is_a_path_bytes_or_an_address_with_data(tokenizer, reader, write, tmp_path):
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "a.png").write_bytes(picture())
    encoded = base64.b64encode(picture()).decode()
    fields = [
        "dir/a.png",
        str(tmp_path / "dir" / "a.png"),
        ["dir/a.png"],
        {"path": "dir/a.png", "bytes": None},
        [{"image": "dir/a.png"}],
        f"data:image/png;base64,{encoded}",
    ]
    train = build(tokenizer, reader, write("a.jsonl", list(map(record, fields))))
    assert len(train) == len(fields)
    for prompt in train:
        assert prompt.text == f"{RUN[2]}what?"
        (found,) = prompt.pictures
        assert found.data.tobytes() == picture()
        assert (found.first, found.rows, found.columns) == (1, 1, 2)
        assert (prompt.tokens[places_of(prompt.pictures)] == reader.place_token).all()


def test_parquet_holds_the_bytes(tokenizer, reader, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parts = [{"role": "user", "content": "<image>what<image>?"}]
    images = [{"bytes": picture(), "path": None}, {"bytes": picture(8, 8, "JPEG"), "path": "x"}]
    table = pyarrow.Table.from_pylist([{"prompt": parts, "solutions": "1", "images": images}])
    parquet.write_table(table, tmp_path / "a.parquet")
    (prompt,) = build(tokenizer, reader, tmp_path / "a.parquet", apply_chat_template=True)
    assert prompt.text == f"<user>{RUN[2]}what{RUN[1]}?<assistant>"
    assert [each.tokens for each in prompt.pictures] == [2, 1]
    tokens = [tokenizer.convert_ids_to_tokens(int(prompt.tokens[p.first - 1])) for p in
              prompt.pictures]  # fmt: skip
    assert tokens == [BEGIN, BEGIN]


def test_marks_and_parts_say_where_pictures_go(tokenizer, reader, write, tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    told = [
        {"role": "system", "content": "look"},
        {"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "image"}]},
    ]
    plain = [{"role": "system", "content": "look"}, {"role": "user", "content": "what?"}]
    rows = [
        record("a.png", "see <image> here"),
        record(["a.png", "a.png"]),
        record("a.png", told),
        record("a.png", plain),
        record(None),
        record([], "a"),
        {"prompt": "none", "solutions": "1"},
    ]
    train = build(tokenizer, reader, write("a.jsonl", rows), apply_chat_template=True)
    assert [prompt.text for prompt in train] == [
        f"<user>see {RUN[2]} here<assistant>",
        f"<user>{RUN[2]}{RUN[2]}what?<assistant>",
        f"<system>look<user>a {RUN[2]}<assistant>",
        f"<system>look<user>{RUN[2]}what?<assistant>",
        "<user>what?<assistant>",
        "<user>a<assistant>",
        "<user>none<assistant>",
    ]
    assert [len(prompt.pictures) for prompt in train] == [1, 2, 1, 1, 0, 0, 0]


BROKEN = {
    "is not there": (record("b.png"), "b.png: No such file"),
    "is cut": (record("cut.png"), "picture 1 is a broken picture"),
    "is none": (record("none.png"), "picture 1 is no picture of a known kind"),
    "is thin": (record("thin.png"), "aspect ratio"),
    "no path": (record(5), "`images` is a path or the bytes of a picture, not int"),
    "far away": (record("https://a.b/c.png"), "nothing is downloaded"),
    "at nobody's home": (record("~nobody-has-this-name/c.png"), "is in no home directory"),
    "base64 alone": (
        record(base64.b64encode(picture(64, 64)).decode()),
        "is a picture in base64; write data:image/png;base64, before it",
    ),
    "a long name": (record("a" * 5000), "characters … aaaa"),
    "no base64": (record("data:image/png;base64,?"), "holds no base64"),
    "one too few": (record("a.png", "<image> <image>"), "has 2 times <image> for 1 pictures"),
    "none for a mark": (record([], "<image>?"), "has 1 times <image> for 0 pictures"),
    "its token": (record("a.png", f"{PLACE}?"), f"its text holds the token {PLACE}"),
}


def test_a_key_of_pictures_that_no_record_has_is_refused(tokenizer, reader, write, tmp_path):
    """Otherwise a model of pictures would be trained on text alone."""
    (tmp_path / "a.png").write_bytes(picture())
    plain = {"prompt": "none", "solutions": "1"}
    path = write("a.jsonl", [plain, record("a.png")])
    train = build(tokenizer, reader, path)
    assert "2 prompts of 2 records, 1 with pictures" in str(train.report)
    twice = write("b.jsonl", [record("a.png")] * 2)
    with pytest.raises(ConfigError, match="image_key: none of 2 records has it") as refused:
        build(tokenizer, reader, twice, files={"image_key": "image"})
    assert "did you mean `images`?" in str(refused.value)
    nested = write("c.jsonl", [{**plain, "seen": {"images": "a.png"}}, {**plain, "seen": {}}])
    train = build(tokenizer, reader, nested, files={"image_key": "seen.images"})
    assert [len(prompt.pictures) for prompt in train] == [1, 0]
    nothing = write("d.jsonl", [record(None)])
    assert "0 with pictures" in str(build(tokenizer, reader, nothing).report)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_picture_costs_its_record_and_is_named(tokenizer, reader, write, tmp_path, case):
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "cut.png").write_bytes(picture(64, 64)[:-300])
    (tmp_path / "none.png").write_bytes(b"no picture")
    (tmp_path / "thin.png").write_bytes(picture(900, 4))
    row, reason = BROKEN[case]
    train = build(tokenizer, reader, write("a.jsonl", [record("a.png"), row]))
    assert train.report.broken == len(train) == 1
    assert reason in train.report.examples[0]
    assert ":2: " in train.report.examples[0]
    assert len(train.report.examples[0]) < 400


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_in_a_picture_is_white(reader, mode):
    nothing = Image.new(mode, (8, 8), (0,) * len(mode) if mode != "P" else 0)
    data = saved(nothing, **({"transparency": 0} if mode == "P" else {}))
    (rows, columns), seen = reader.size(data), np.frombuffer(data, np.uint8)
    pixels, _ = reader.pixels([Picture(data=seen, first=0, rows=rows, columns=columns)])
    white, _ = reader.pixels([
        Picture(data=np.frombuffer(saved(Image.new("L", (8, 8), 255)), np.uint8), first=0, rows=1,
                columns=1)
    ])  # fmt: skip
    assert (pixels == white).all()


def test_a_picture_is_turned_as_its_file_says(reader):
    turned = Image.new("RGB", (32, 16))
    exif = turned.getexif()
    exif[0x0112] = 6  # orientation: a quarter to the right
    assert reader.size(saved(turned, "JPEG")) == (2, 4)
    assert reader.size(saved(turned, "JPEG", exif=exif)) == (4, 2)


def test_a_picture_of_more_than_bytes_is_broken(reader):
    deep = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)
    with pytest.raises(ValueError, match="has numbers of mode I;16"):
        reader.size(saved(deep))


def test_a_picture_in_a_text_set_is_named(tokenizer, reader, write):
    rows = [{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "solutions": "1"}]
    section = {"files": {"train": [str(write("a.jsonl", rows))]}}
    config = validate(PromptDataConfig, section, "test")
    with pytest.raises(ConfigError, match="has a picture, and no image_key says where it is"):
        config.build(tokenizer)


def test_pictures_over_the_limit_are_made_smaller_and_long_prompts_left_out(
    tokenizer, reader, write, tmp_path
):
    (tmp_path / "a.png").write_bytes(picture(64, 32))
    path = write("a.jsonl", [record("a.png")])
    (whole,) = build(tokenizer, reader, path)
    assert (whole.pictures[0].rows, whole.pictures[0].columns) == (4, 8)
    (small,) = build(tokenizer, reader, path, files={"max_image_tokens": 8})
    assert (small.pictures[0].rows, small.pictures[0].columns) == (2, 4)
    pixels, grids = reader.pixels(small.pictures)
    assert (pixels.shape, grids.tolist()) == ((32, 96), [[1, 4, 8]])
    with pytest.raises(ConfigError, match=r"39 tokens, 16 are allowed"):
        build(tokenizer, reader, path, max_prompt_length=16)
    with pytest.raises(ConfigError, match="without image_key"):
        build(tokenizer, reader, path, files={"max_image_tokens": 8, "image_key": None})


def test_pixel_values_are_those_of_the_published_processor(reader, folder):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    published = Qwen2VLImageProcessorPil.from_pretrained(folder)
    files = [picture(61, 30, seed=1), picture(20, 50, seed=2)]
    found = published(images=[Image.open(io.BytesIO(data)) for data in files], return_tensors="np")
    sizes = [reader.size(data) for data in files]
    own = [
        Picture(data=np.frombuffer(data, np.uint8), first=0, rows=rows, columns=columns)
        for data, (rows, columns) in zip(files, sizes, strict=True)
    ]
    pixels, grids = reader.pixels(own)
    assert (grids == found["image_grid_thw"]).all()
    assert np.abs(pixels - found["pixel_values"]).max() == 0


def test_pictures_are_part_of_what_a_prompt_is(tokenizer, reader, write, tmp_path):
    (tmp_path / "a.png").write_bytes(picture(seed=1))
    (tmp_path / "b.png").write_bytes(picture(seed=2))
    first, second = (
        build(tokenizer, reader, write(f"{name}.jsonl", [record(f"{name}.png")]))
        for name in ("a", "b")
    )
    assert first[0].text == second[0].text
    assert first[0].content != second[0].content
    assert first.sha256 != second.sha256
    rolled = first[0].rolled(3)
    assert rolled.tokens.tolist() != first[0].tokens.tolist()
    assert (rolled.tokens[places_of(rolled.pictures)] == reader.place_token).all()


def test_examples_have_pictures_too(tokenizer, reader, write, tmp_path):
    (tmp_path / "a.png").write_bytes(picture())
    rows = [{"prompt": "what?", "answer": "noise", "images": "a.png"}]
    path = write("a.jsonl", rows)
    config = validate(
        TextExamplesConfig, {"files": {"train": [str(path)], "image_key": "images"}}, "test"
    )
    (example,) = config.build(tokenizer, reader).train.examples
    assert example.pictures[0].tokens == 2
    assert (example.prompt[1:3] == reader.place_token).all()
    broken = [*rows, {**rows[0], "images": "b.png"}]
    report = validate(
        TextExamplesConfig,
        {"files": {"train": [str(write("b.jsonl", broken))], "image_key": "images"}},
        "test",
    ).build(tokenizer, reader)
    assert "1 broken" in report.train.report


def test_squares_are_counted_and_split_by_what_is_seen():
    task = SquaresTask(levels=(2, 3), size=60, held_out=20)
    train, held_out = task.items("train"), task.items("held_out")
    assert not {item.content for item in train} & {item.content for item in held_out}
    assert train == task.items("train")
    for item in train:
        image = np.asarray(Image.open(io.BytesIO(item.pictures[0])))
        assert image.shape == (16 * item.level, 16 * item.level, 3)
        colour = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220)}[
            item.prompt.removesuffix(":")
        ]
        assert (image == colour).all(axis=2).sum() == 100 * int(item.answer)
        read = item.target.partition(" <answer>")[0].replace(" ", "")
        assert len(read) == item.level**2
        assert read.count(item.prompt[0]) == int(item.answer)


def test_a_folder_must_say_how_pictures_are_read(folder, tokenizer, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ConfigError, match="reads text only, and prompts have pictures"):
        PictureReader(tmp_path, tokenizer)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "vision_config": {}}))
    with pytest.raises(ConfigError, match="pictures of the family llava are not known"):
        PictureReader(tmp_path, tokenizer)
    content = {"model_type": "qwen3_vl", "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"holds no preprocessor_config\.json"):
        PictureReader(tmp_path, tokenizer)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match="does not say how pictures are read"):
        PictureReader(tmp_path, tokenizer)
    copy_settings(folder, tmp_path)
    assert PictureReader(tmp_path, tokenizer).size(picture(16, 16)) == (2, 2)
    (tmp_path / "text").mkdir()
    plain = train_tokenizer(["ab"], tmp_path / "text")
    with pytest.raises(ConfigError, match=r"the tokenizer has no token <\|vision_start\|>"):
        PictureReader(tmp_path, plain)
