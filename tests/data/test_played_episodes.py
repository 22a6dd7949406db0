"""What is written down of an evaluation that is under way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlinf.data.played_episodes import PlayedEpisodes
from rlinf.envs.results import EpisodeRecord


def episode(number: int, *, valid: bool = True) -> EpisodeRecord:
    return EpisodeRecord(
        env=0, episode_id=number, seed=7 * number, success_once=True, success_at_end=False,
        fail_once=False, episode_return=0.1 * number, episode_len=5, reward=0.02 * number,
        valid=valid, task=1, seed_shift=2,
    )  # fmt: skip


@pytest.fixture
def kept(tmp_path: Path) -> PlayedEpisodes:
    return PlayedEpisodes(tmp_path / "spec_1", {"spec": "1", "played": "by this policy"})


def write(kept: PlayedEpisodes, rank: int, *numbers: int) -> None:
    with kept.writer(rank) as writer:
        writer.add([episode(number) for number in numbers])


def test_what_several_workers_wrote_is_read_until_it_is_removed(kept: PlayedEpisodes) -> None:
    assert kept.read() == {}
    write(kept, 0, 1, 2)
    write(kept, 1, 3)
    write(kept, 0, 4)
    assert kept.read() == {number: episode(number) for number in (1, 2, 3, 4)}
    kept.remove()
    assert kept.read() == {}
    assert not kept.files()


def test_a_faulty_episode_is_not_written_as_it_is_played_again(kept: PlayedEpisodes) -> None:
    with kept.writer(0) as writer:
        writer.add([episode(1, valid=False), episode(2)])
    assert list(kept.read()) == [2]


def test_what_is_of_another_evaluation_is_neither_read_nor_kept(
    kept: PlayedEpisodes, tmp_path: Path
) -> None:
    write(kept, 0, 1)
    other = PlayedEpisodes(tmp_path / "spec_1", {"spec": "1", "played": "by another"})
    assert other.read() == {}
    write(other, 0, 2)
    assert list(other.read()) == [2]
    assert kept.read() == {}


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_was_not_written_whole_is_left_out(kept: PlayedEpisodes, cut: int) -> None:
    write(kept, 0, 1, 2)
    (file,) = kept.files()
    os.truncate(file, file.stat().st_size - cut)
    assert list(kept.read()) == ([1, 2] if cut == 1 else [1])
    write(kept, 0, 3)
    assert list(kept.read()) == ([1, 2, 3] if cut == 1 else [1, 3])


def test_a_file_whose_first_line_was_not_written_whole_begins_anew(kept: PlayedEpisodes) -> None:
    write(kept, 0)
    (file,) = kept.files()
    os.truncate(file, file.stat().st_size - 1)
    assert kept.read() == {}
    write(kept, 0, 1)
    assert list(kept.read()) == [1]


def test_a_second_evaluation_at_the_same_time_writes_nothing(
    kept: PlayedEpisodes, caplog: pytest.LogCaptureFixture
) -> None:
    with kept.writer(0) as first, kept.writer(0) as second:
        first.add([episode(1)])
        second.add([episode(2)])
    assert list(kept.read()) == [1]
    assert "An evaluation that is interrupted begins anew" in caplog.text


def test_where_nothing_can_be_written_the_evaluation_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(PlayedEpisodes(tmp_path / "gone" / "spec_1", {}), 0, 1)
    assert "No such file or directory" in caplog.text
    caplog.clear()
    kept = PlayedEpisodes(tmp_path / "spec_1", {})
    with kept.writer(0) as writer:
        writer.add([episode(1)])

        def full(descriptor: int, content: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("rlinf.data.played_episodes.os.write", full)
        writer.add([episode(2)])
        writer.add([episode(3)])
    assert caplog.text.count("No space left on device") == 1
    assert list(kept.read()) == [1]
