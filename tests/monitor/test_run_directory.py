"""A run directory belongs to one run and one process."""

import errno
import os
import shutil
import signal
import subprocess
import sys

import pytest

from rlinf.errors import CheckpointError, UserError
from rlinf.monitor.run_directory import RunDirectory

HOLDER = """
import os, sys, time
from rlinf.monitor.run_directory import RunDirectory
run = RunDirectory.open(sys.argv[1])
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def a_run(tmp_path, **options):
    run = RunDirectory.create(tmp_path / "runs", "reach", **options)
    run.write_config("seed: 1\n")
    return run


def test_layout_and_latest_link(tmp_path):
    first, second = a_run(tmp_path), a_run(tmp_path)
    assert first.path != second.path
    assert first.path.parent == tmp_path / "runs" / "reach"
    assert (tmp_path / "runs" / "reach" / "latest").resolve() == second.path
    for directory in (first.checkpoints, first.evaluations):
        assert directory.is_dir()
        assert directory.parent == first.path
    assert first.videos.parent == first.path
    assert not first.videos.exists()  # a run of a language model films nothing
    assert first.config.read_text() == "seed: 1\n"
    assert [first.metrics.name, first.log.name, first.timeline.name] == [
        "metrics.jsonl", "run.log", "timeline.json",
    ]  # fmt: skip
    assert first.name == first.path.name


def test_a_directory_of_the_users_choice(tmp_path):
    path = tmp_path / "deep" / "mine"
    with a_run(tmp_path, path=path) as run:
        assert run.path == path
    assert not (tmp_path / "runs").exists()


def test_a_non_empty_directory_is_not_reused(tmp_path):
    with a_run(tmp_path, path=tmp_path / "my run"):
        pass
    with pytest.raises(UserError, match=r"not empty \(it holds checkpoints.*rlinf resume '"):
        a_run(tmp_path, path=tmp_path / "my run")
    with RunDirectory.open(tmp_path / "my run") as run:
        assert run.config.read_text() == "seed: 1\n"
    (tmp_path / "my run" / "config.yaml").unlink()
    (tmp_path / "my run" / "metrics.jsonl").touch()
    with pytest.raises(UserError, match=r"not empty .* Give another one with --run-dir\.$"):
        a_run(tmp_path, path=tmp_path / "my run")


@pytest.mark.parametrize("last", ["origin.json", ".config.yaml.0123abcd", "checkpoints"])
def test_what_was_killed_before_it_had_a_configuration_is_begun_again(tmp_path, last):
    place = tmp_path / "mine"
    run = RunDirectory.create(tmp_path, "reach", path=place)
    if last != "checkpoints":
        (place / last).write_text("{}")
    with pytest.raises(UserError, match="is being written by another process"):
        a_run(tmp_path, path=place)
    run.close()  # as the kernel does
    (place / "checkpoints" / "step_1").mkdir()
    with pytest.raises(UserError, match="is not empty"):
        a_run(tmp_path, path=place)
    (place / "checkpoints" / "step_1").rmdir()
    with a_run(tmp_path, path=place) as run:
        assert run.config.is_file()
    assert not list(place.glob(".config.yaml.*"))


def test_only_a_run_can_be_opened(tmp_path):
    with pytest.raises(UserError, match=r"no config\.yaml"):
        RunDirectory.open(tmp_path)


def test_unwritable_places_are_user_errors(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match=r"cannot be written.*--run-dir"):
        a_run(tmp_path, path=file / "below")
    with pytest.raises(UserError, match="cannot be written"):
        a_run(tmp_path, path=file)
    with pytest.raises(UserError, match="cannot be written"):
        RunDirectory.create("/proc/runs", "reach")


def test_a_name_that_files_could_not_hold_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has a name that is no UTF-8.*--run-dir"):
        RunDirectory.create("runs", "recipe", path=tmp_path / "run\udcff")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.yaml", "env_spec.json", "videos"])
def test_a_link_that_leads_nowhere_is_named(tmp_path, name):
    with RunDirectory.create("runs", "recipe", path=tmp_path / "run") as run:
        run.write_config("seed: 0\n")
    (tmp_path / "run" / name).symlink_to(name)
    with pytest.raises(UserError, match=f"{name} is a link that leads nowhere: remove it"):
        RunDirectory.open(tmp_path / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="Permission denied"):
        a_run(tmp_path)


def test_a_part_that_cannot_be_written_is_told_before_the_run_goes_on(tmp_path, monkeypatch):
    with a_run(tmp_path, path=tmp_path / "run") as run:
        run.log.touch()
    opened = os.open
    # An administrator may write to whatever belongs to another user.
    refused = run.checkpoints

    def open_as_user(path, flags, *arguments, **options):
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(refused)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", open_as_user)
    for refused in (run.checkpoints, run.evaluations, run.log, run.path / ".lock"):
        with pytest.raises(UserError) as error:
            RunDirectory.open(run.path)
        assert str(error.value).startswith(f"{refused} cannot be written (Permission denied). Make")
    refused = tmp_path / "elsewhere"
    assert not run.metrics.exists()
    RunDirectory.open(run.path).close()


def test_a_lock_that_cannot_be_made_is_an_error_of_the_user(tmp_path):
    path = tmp_path / "run"
    (path / ".lock").mkdir(parents=True)
    with pytest.raises(UserError, match=r"\.lock cannot be written \(Is a directory\)\. Give"):
        RunDirectory.create("runs", "recipe", path=path)


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    a_run(tmp_path, path=tmp_path / "mine").close()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "mine"], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    try:
        orphan = int(holder.stdout.readline())
        with pytest.raises(UserError, match=f"another process.*{holder.pid}"):
            RunDirectory.open(tmp_path / "mine")
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    try:
        with RunDirectory.open(tmp_path / "mine"):
            pass
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_what_a_killed_process_had_begun_to_write_is_removed(tmp_path):
    with a_run(tmp_path, path=tmp_path / "mine") as run:
        (run.path / ".policy.safetensors.0d5fb72e").write_bytes(b"half of")
        (run.path / ".initial_model.123" / "complete").mkdir(parents=True)
        (run.path / ".notes.of.mine").write_text("kept")
        with pytest.raises(UserError, match="another process"):
            RunDirectory.open(run.path)
        assert (run.path / ".initial_model.123").is_dir()  # it is still being written
    RunDirectory.open(run.path).close()
    hidden = sorted(entry.name for entry in run.path.glob(".*"))
    assert hidden == [".lock", ".notes.of.mine"]


def test_what_is_told_of_later_steps_is_removed(tmp_path):
    stays = [
        "completions/9.jsonl",
        "completions/notes.txt",
        "evaluations/periodic_spec.json",
        "evaluations/periodic_step_00000009.json",
        "evaluations/spec_0123456789ab_step_00000009_drawn.json",
        "evaluations/spec_0123456789ab_step_00000010_served_there_80.json",
        "evaluations/spec_0123456789ab_step_00000010_drawn_served_there.json",
        "videos/trained_policy.mp4",
    ]
    goes = [
        "completions/10.jsonl",
        "completions/123456789.jsonl",
        "evaluations/held_out_step_00000010.json",
        "evaluations/spec_0123456789ab_step_123456789_drawn.json",
        "videos/spec_0123456789ab_step_00000010.mp4",
    ]
    with RunDirectory.create(tmp_path, "recipe") as run:
        for name in stays + goes:
            path = run.path / name
            path.parent.mkdir(exist_ok=True)
            path.touch()
        run.discard_after(9)
        assert sorted(stays) == sorted(
            f"{path.parent.name}/{path.name}"
            for directory in ("completions", "evaluations", "videos")
            for path in (run.path / directory).iterdir()
        )


def test_the_lock_is_given_up_at_the_end(tmp_path):
    run = a_run(tmp_path, path=tmp_path / "mine")
    with run, pytest.raises(UserError, match="another process"):
        RunDirectory.open(run.path)
    RunDirectory.open(run.path).close()
    run.close()


def test_a_copy_in_the_place_of_a_run_that_goes_on_is_not_written_to(tmp_path):
    path, kept = tmp_path / "run", tmp_path / "kept"
    with RunDirectory.create(tmp_path, "recipe", path=path) as run:
        run.write_config("seed: 0\n")
        run.require()
        path.rename(kept)
        with pytest.raises(CheckpointError, match="run is no longer there"):
            run.require()
        shutil.copytree(kept, path)
        with pytest.raises(CheckpointError, match="run is no longer there"):
            run.require()
    with RunDirectory.open(path) as run:
        run.require()


def test_nothing_is_left_of_a_run_that_never_began(tmp_path):
    with a_run(tmp_path) as only:
        only.log.write_text("said")
        only.discard()
    assert not list(tmp_path.iterdir())
    kept = a_run(tmp_path)
    with a_run(tmp_path) as refused:
        (refused.path / "model").mkdir()
        refused.discard()
    latest = tmp_path / "runs" / "reach" / "latest"
    assert latest.resolve() == kept.path
    assert sorted(latest.parent.iterdir()) == [kept.path, latest]


def test_a_directory_that_the_user_made_and_what_a_later_run_links_stay(tmp_path):
    (tmp_path / "mine").mkdir()
    with a_run(tmp_path, path=tmp_path / "mine") as refused:
        refused.discard()
    assert not list((tmp_path / "mine").iterdir())
    refused, later = a_run(tmp_path), a_run(tmp_path)
    refused.discard()
    assert (tmp_path / "runs" / "reach" / "latest").resolve() == later.path
    assert not refused.path.exists()


def test_a_run_that_has_begun_is_not_discarded(tmp_path):
    with a_run(tmp_path) as run:
        run.begun = True
        with pytest.raises(ValueError, match="has begun"):
            run.discard()
    with RunDirectory.open(run.path) as run, pytest.raises(ValueError, match="has begun"):
        run.discard()
    assert run.config.exists()
