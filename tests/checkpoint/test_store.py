"""Commit, prune, load, refuse: what the runner relies on."""

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from rlinf.checkpoint import contents as contents_module
from rlinf.checkpoint.config import CheckpointConfig
from rlinf.checkpoint.contents import load_checkpoint
from rlinf.checkpoint.files import is_disk_full, write_atomic
from rlinf.checkpoint.store import CheckpointStore
from rlinf.errors import CheckpointError
from tests.checkpoint.trees import assert_same, small_state, state_of_everything
from tests.warm import Warm


def open_store(directory, **options):
    return CheckpointStore(directory, CheckpointConfig(**{"keep_last": None, **options}))


def filled(directory, steps=(10, 20, 30), **options):
    store = open_store(directory, **options)
    for step in steps:
        store.save(step, small_state(step), blocking=True)
    return store


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_everything_comes_back(tmp_path):
    tree = state_of_everything()
    store = CheckpointStore(tmp_path / "new" / "checkpoints", config_hash="abc")
    store.save(120, tree, meta={"task": "reach", "cursor": [1, 2]}, metric=0.5)
    store.wait()
    found = CheckpointStore(store.directory, read_only=True).load()
    assert_same(found.tree, tree)
    assert (found.step, found.metric, found.config_hash) == (120, 0.5, "abc")
    assert found.meta == {"task": "reach", "cursor": [1, 2]}
    assert found.path.name == "step_00000120"
    assert os.readlink(store.directory / "latest") == "step_00000120"
    assert load_checkpoint(store.directory / "latest").step == 120


def test_large_state_is_split_over_files(tmp_path, monkeypatch):
    monkeypatch.setattr(contents_module, "_SHARD_BYTES", 1000)
    tree = {f"layer{i}": torch.rand(100) for i in range(7)} | {"big": torch.rand(1000)}
    store = CheckpointStore(tmp_path)
    store.save(1, tree, blocking=True)
    assert len(list(store.path(1).glob("*.safetensors"))) == 5
    assert_same(store.load().tree, tree)


def test_newest_and_best_are_kept(tmp_path):
    store = open_store(tmp_path, keep_last=2, keep_best=2)
    metrics = {1: 0.9, 2: 0.1, 3: None, 4: 0.8, 5: float("nan"), 6: 0.9, 7: 0.2, 8: None}
    for step, metric in metrics.items():
        store.save(step, small_state(step), metric=metric)
    store.wait()
    assert store.steps() == [1, 6, 7, 8]
    assert store.load("best").step == 6
    assert {step: m.metric for step, m in store.manifests().items()} == {
        1: 0.9, 6: 0.9, 7: 0.2, 8: None,
    }  # fmt: skip


def test_checkpoints_beyond_the_saved_one_do_not_take_its_place(tmp_path):
    """A run may go on from an older one; what lies beyond it is of another history."""
    with open_store(tmp_path) as store:
        for step in (1, 2, 3, 8, 9):
            store.save(step, small_state(step), metric=step)
    with open_store(tmp_path, keep_last=2, keep_best=1) as store:
        store.save(4, small_state(4), metric=0.0)
    assert store.steps() == [3, 4, 8, 9]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = filled(tmp_path)
    store.save(20, {"other": 1}, blocking=True)
    assert store.load(20).tree == {"other": 1}
    assert names(tmp_path) == ["latest", "step_00000010", "step_00000020", "step_00000030"]


def test_an_abandoned_future_is_discarded(tmp_path):
    store = filled(tmp_path)
    assert store.discard_after(10) == [20, 30]
    assert store.load().step == 10
    assert os.readlink(tmp_path / "latest") == "step_00000010"


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size - 3)


@pytest.mark.parametrize("file", ["manifest.json", "tree.json", "tensors-00000.safetensors"])
@pytest.mark.parametrize("damage", [flip_bit, truncate, os.remove])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_used(tmp_path, file, damage):
    store = filled(tmp_path)
    damage(store.path(30) / file)
    found = store.load()
    assert found.step == 20
    assert_same(found.tree, small_state(20))
    [refusal] = found.refused
    assert refusal.path == store.path(30)
    assert "step_00000030" in refusal.reason
    assert file in refusal.reason
    for explicit in (30, str(store.path(30)), store.path(30)):
        with pytest.raises(CheckpointError, match=f"step_00000030.*{file}"):
            store.load(explicit)


def test_a_copy_under_another_number_is_not_taken_for_the_newest(tmp_path, caplog):
    store = filled(tmp_path)
    shutil.copytree(store.path(10), store.path(99))
    assert store.load().step == 30
    assert f"{store.path(99)} cannot be used: it is of step 10: it was renamed or copied" in (
        caplog.text
    )
    assert 99 not in store.manifests()
    with pytest.raises(CheckpointError, match="it is of step 10"):
        load_checkpoint(store.path(99))
    assert load_checkpoint(shutil.copytree(store.path(10), tmp_path / "kept")).step == 10
    truncate(shutil.copytree(store.path(10), store.path(98)) / "manifest.json")
    assert store.discard_after(20) == [30, 98, 99]
    assert store.steps() == [10, 20]
    (aside,) = store.directory.glob("aside_*")
    assert load_checkpoint(aside).step == 10


def test_every_single_bit_of_the_small_files_matters(tmp_path):
    store = filled(tmp_path, steps=(10,))
    for name in ("manifest.json", "tree.json"):
        path = store.path(10) / name
        good = path.read_bytes()
        for position in range(0, len(good), 7):
            data = bytearray(good)
            data[position] ^= 1 << position % 8
            path.write_bytes(data)
            with pytest.raises(CheckpointError, match=r"manifest\.json|tree\.json|format"):
                store.load(10)
        path.write_bytes(good)
    assert store.load(10).step == 10


def test_no_good_checkpoint_is_an_error_that_lists_them(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        CheckpointStore(tmp_path / "nothing").load()
    store = filled(tmp_path)
    for step in (10, 20, 30):
        truncate(store.path(step) / "tree.json")
    with pytest.raises(CheckpointError) as caught:
        store.load()
    assert all(f"step_000000{step}" in str(caught.value) for step in (10, 20, 30))
    assert "Put back a copy" in str(caught.value)
    with pytest.raises(CheckpointError, match="no checkpoint of step 24; the nearest one is of"):
        store.load(24)
    with pytest.raises(CheckpointError, match="no such directory"):
        store.load(str(tmp_path / "elsewhere"))


def test_a_later_format_is_refused(tmp_path):
    store = filled(tmp_path, steps=(10,))
    path = store.path(10) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 9}))
    with pytest.raises(CheckpointError, match="format is version 9"):
        store.load(10)


def test_loading_runs_no_pickle(tmp_path):
    store = filled(tmp_path, steps=(10,))
    ran = tmp_path / "ran"
    payload = b"cos\nsystem\n(S'touch %s'\ntR." % str(ran).encode()
    (store.path(10) / "extra.pkl").write_bytes(payload)
    (store.path(10) / "tensors-00000.safetensors").write_bytes(payload)
    with pytest.raises(CheckpointError):
        store.load(10)
    assert not ran.exists()


def test_what_a_killed_writer_left_is_ignored_and_removed(tmp_path):
    filled(tmp_path)
    half = tmp_path / ".writing-step_00000040-ab"
    shutil.copytree(tmp_path / "step_00000030", half)
    (tmp_path / ".removed-step_00000005-cd").mkdir()
    (tmp_path / ".latest.0badcafe").symlink_to("step_00000030")
    # Died between the two renames of a replacement.
    (tmp_path / "step_00000020").rename(tmp_path / ".replaced-step_00000020")
    assert CheckpointStore(tmp_path, read_only=True).load().step == 30
    assert half.exists()
    store = open_store(tmp_path)
    assert names(tmp_path) == ["latest", "step_00000010", "step_00000020", "step_00000030"]
    assert store.load(20).step == 20


def full_disk(monkeypatch, code=errno.ENOSPC, after=1):
    """Let the disk be full after some files."""
    calls = []
    real = contents_module.write_durable

    def write(path, data):
        calls.append(path)
        if len(calls) > after:
            path.write_bytes(data[: len(data) // 2])
            raise OSError(code, os.strerror(code))
        real(path, data)

    monkeypatch.setattr(contents_module, "write_durable", write)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_full_disk_warns_and_harms_nothing(tmp_path, monkeypatch, caplog, code, after):
    store = filled(tmp_path)
    full_disk(monkeypatch, code, after)
    store.save(40, small_state(40))
    store.wait()
    assert names(tmp_path) == ["latest", "step_00000010", "step_00000020", "step_00000030"]
    assert [failure.step for failure in store.failures] == [40]
    assert store.last_committed_step == 30
    assert "step 40" in caplog.text
    assert os.strerror(code) in caplog.text
    monkeypatch.undo()
    store.save(50, small_state(50), blocking=True)
    assert store.load().step == 50


def test_a_step_that_must_be_there_is_asked_for(tmp_path, monkeypatch):
    store = filled(tmp_path)
    store.require(30)
    store.require(35)  # nobody tried to save it
    full_disk(monkeypatch)
    store.save(40, small_state(40))
    with pytest.raises(CheckpointError, match=r"step, 40, was not written.*No space") as caught:
        store.require(40)
    assert is_disk_full(caught.value.__cause__)
    monkeypatch.undo()
    store.save(40, small_state(40))
    store.require(40)


def test_a_run_that_was_moved_is_not_made_again_at_its_old_place(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    store = open_store(run / "checkpoints")
    store.save(1, small_state(1), blocking=True)
    run.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"run is no longer there: a run that is moved"):
        store.save(2, small_state(2), blocking=True)
    assert not run.exists()
    assert open_store(tmp_path / "moved/checkpoints").load().step == 1


def test_full_disk_may_stop_the_run(tmp_path, monkeypatch):
    store = filled(tmp_path, on_full_disk="stop")
    full_disk(monkeypatch)
    store.save(40, small_state(40))
    with pytest.raises(CheckpointError, match=r"step 40 was not written.*No space left"):
        store.save(50, small_state(50))
    assert store.load().step == 30


def test_a_file_that_does_not_fit_is_named(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/\.?results\.json") as caught:
        write_atomic(tmp_path / "results.json", b"{}")
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_an_error_on_its_way_out_is_not_hidden_by_the_writer(tmp_path, monkeypatch, caplog):
    full_disk(monkeypatch, errno.EIO)
    with pytest.raises(ZeroDivisionError), open_store(tmp_path) as store:  # noqa: PT012
        store.save(1, small_state(1))
        raise ZeroDivisionError
    assert "Input/output error" in caplog.text


def test_other_failures_of_the_writer_are_never_lost(tmp_path, monkeypatch):
    store = filled(tmp_path)
    full_disk(monkeypatch, errno.EIO)
    store.save(40, small_state(40))
    with pytest.raises(CheckpointError, match="Input/output error"):
        store.wait()
    store.wait()


IN_A_CHILD = """
    import resource, sys
    from pathlib import Path
    import torch
    from rlinf.checkpoint.store import CheckpointStore
    store = CheckpointStore(sys.argv[1])
    store.save(1, {"weights": torch.ones(1000)}, blocking=True)
    if len(sys.argv) > 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    store.save(2, {"weights": torch.ones(1_000_000)}, blocking=True)
    assert [failure.step for failure in store.failures] == [2], store.failures
    assert store.load().step == 1
    assert sorted(p.name for p in Path(sys.argv[1]).iterdir()) == ["latest", "step_00000001"]
    print(store.failures[0].reason)
"""


def test_a_file_size_limit_is_met_for_real(tmp_path):
    script = textwrap.dedent(IN_A_CHILD)
    ran = Warm(["-c", script, str(tmp_path / "c"), "limit"])
    output, errors = ran.communicate(timeout=120)
    assert ran.returncode == 0, errors.decode()
    assert b"File too large" in output


def test_a_full_file_system_is_met_for_real(tmp_path):
    may_mount = ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size=1m none {tmp_path}"]
    if (
        not shutil.which("unshare")
        or subprocess.run(may_mount, check=False, capture_output=True).returncode
    ):
        pytest.skip("this machine does not let us mount a small file system")
    command = f'{may_mount[-1]} && exec "$@"'
    script = textwrap.dedent(IN_A_CHILD)
    ran = subprocess.run(
        [*may_mount[:-1], command, "sh", sys.executable, "-c", script, tmp_path / "c"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "No space left" in ran.stdout


def test_saving_returns_before_the_write_and_the_next_save_waits(tmp_path, monkeypatch):
    go_on, real = threading.Event(), contents_module.write_durable

    def slow(path, data):
        go_on.wait(30)
        real(path, data)

    monkeypatch.setattr(contents_module, "write_durable", slow)
    store = open_store(tmp_path)
    weights = torch.zeros(3)
    store.save(1, {"weights": weights})
    assert store.steps() == []
    weights += 1
    go_on.set()
    store.save(2, {"weights": weights})
    assert store.steps()[0] == 1
    store.close()
    assert store.load(1).tree["weights"].sum() == 0
    assert store.load(2).tree["weights"].sum() == 3


def test_a_store_for_reading_and_bad_meta_refuse_to_save(tmp_path):
    with pytest.raises(CheckpointError, match="for reading"):
        CheckpointStore(tmp_path, read_only=True).save(1, {})
    with pytest.raises(TypeError, match="meta"):
        CheckpointStore(tmp_path).save(1, {}, meta={"nan": float("nan")})
