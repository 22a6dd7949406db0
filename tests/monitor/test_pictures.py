"""Learning curves and videos are real pictures of real numbers."""

import tracemalloc

import imageio_ffmpeg
import matplotlib.image
import numpy as np
import pytest

from rlinf.errors import UserError
from rlinf.monitor.curve import Curve, overlay_curves, write_learning_curve
from rlinf.monitor.loggers.base import LoggerConfig
from rlinf.monitor.metrics_log import MetricsLog
from rlinf.monitor.video import framed, tile, write_video
from tests.conftest import drawing


@pytest.fixture(autouse=True)
def _drawn():
    with drawing():
        yield


def a_run(run_dir, seed=0, steps=10, evaluated=True):
    generator = np.random.default_rng(seed)
    with MetricsLog(run_dir, LoggerConfig(backends=())) as log:
        for step in range(1, steps + 1):
            metrics = {
                "env/steps": 100 * step,
                "env/success_once": step / steps if step > 1 else float("nan"),
                "env/return": 10 * step + generator.normal(),
                "time/step": 0.5,
            }
            if evaluated and step % 3 == 0:
                rate = step / steps
                metrics |= {"eval/success": rate, "eval/success_low": rate - 0.1,
                            "eval/success_high": rate + 0.05}  # fmt: skip
            log.log(step, metrics)
    return run_dir


def test_the_numbers_behind_a_curve(tmp_path):
    curve = Curve.of(a_run(tmp_path))
    assert curve.series("eval/success") == [(300, 0.3), (600, 0.6), (900, 0.9)]
    assert curve.series("env/success_once")[0] == (200, 0.2)
    assert curve.seconds()[-1] == (1000, 5.0)
    assert curve.over_seconds([(300, 0.3)]) == [(1.5, 0.3)]


@pytest.mark.parametrize("evaluated", [True, False])
@pytest.mark.parametrize("steps", [1, 10])
def test_learning_curve_is_drawn(tmp_path, steps, evaluated):
    path = write_learning_curve(a_run(tmp_path, steps=steps, evaluated=evaluated))
    assert path == tmp_path / "learning_curve.png"
    picture = matplotlib.image.imread(path)
    assert picture.shape[1] > 2 * picture.shape[0]
    assert picture[..., :3].std() > 0.05


@pytest.mark.parametrize("evaluated", [True, False])
def test_rates_and_losses_have_axes_of_their_own(tmp_path, evaluated, monkeypatch):
    shown = {}
    monkeypatch.setattr("rlinf.monitor.curve._save", lambda figure, path: shown.update(
        {axes.get_ylabel(): {line.get_label() for line in axes.get_lines()}
         for axes in figure.axes}))  # fmt: skip
    with MetricsLog(tmp_path, LoggerConfig(backends=())) as log:
        for step in range(1, 5):
            metrics = {"train/loss": 1.0 / step, "validation/loss": 2.0 / step, "time/step": 0.5}
            log.log(step, metrics | ({"eval/success": 0.25 * step} if evaluated else {}))
    write_learning_curve(tmp_path)
    if evaluated:
        assert shown["loss"] == {"loss", "validation loss"}
        assert not any("loss" in label for label in shown["success rate"])
    else:
        assert (shown["validation loss"], shown["loss"]) == ({"validation loss"}, {"loss"})


@pytest.mark.parametrize("steps", [0, 3])
def test_evaluations_before_and_after_the_steps_leave_the_time_axis(tmp_path, steps, monkeypatch):
    shown = []
    monkeypatch.setattr("rlinf.monitor.curve._save", lambda figure, path: shown.extend(
        top.get_xlabel() for axes in figure.axes for top in axes.child_axes))  # fmt: skip
    with MetricsLog(tmp_path, LoggerConfig(backends=())) as log:
        log.log(0, {"eval/success": 0.0})
        for step in range(1, steps + 1):
            log.log(step, {"rollout/rewards": 0.5, "time/step": 0.5})
        log.log(steps, {"eval/success": 1.0})
    write_learning_curve(tmp_path)
    assert shown == ["training seconds"] * (2 if steps else 0)


@pytest.mark.parametrize("against", ["steps", "seconds"])
@pytest.mark.parametrize("metric", ["eval/success", "env/return"])
def test_several_runs_in_one_picture(tmp_path, against, metric):
    runs = {
        "ours": [a_run(tmp_path / f"ours{seed}", seed, steps=8 + seed) for seed in range(3)],
        "other": [a_run(tmp_path / "other", evaluated=False)],
    }
    path = overlay_curves(runs, tmp_path / "docs" / "o.png", metric=metric, against=against)
    assert matplotlib.image.imread(path)[..., :3].std() > 0.05


def test_a_run_without_metrics(tmp_path):
    with pytest.raises(UserError, match="no metrics yet"):
        write_learning_curve(tmp_path)


def frames(count, height=64, width=96, level=0):
    return [np.full((height, width, 3), level + 5 * i, dtype=np.uint8) for i in range(count)]


def read_video(path):
    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    width, height = meta["size"]
    pictures = [np.frombuffer(raw, np.uint8).reshape(height, width, 3) for raw in reader]
    return meta, pictures


def test_a_video_plays_back(tmp_path):
    path = write_video(tmp_path / "videos" / "policy.mp4", frames(20), fps=10)
    meta, pictures = read_video(path)
    assert (meta["size"], meta["fps"], len(pictures)) == ((96, 64), 10, 20)
    assert meta["codec"].startswith("h264")
    for index, picture in enumerate(pictures):
        assert abs(float(picture.mean()) - 5 * index) < 6
    assert list(path.parent.iterdir()) == [path]


def test_odd_sizes_are_padded(tmp_path):
    meta, _ = read_video(write_video(tmp_path / "v.mp4", frames(3, 65, 67)))
    assert meta["size"] == (68, 66)


def test_tiles_of_several_environments():
    pictures = tile([frames(4), frames(2, level=100), frames(3, level=200)])
    assert len(pictures) == 4
    assert pictures[0].shape == (128, 192, 3)
    last = pictures[3]
    corners = [last[0, 0, 0], last[0, 96, 0], last[64, 0, 0], last[64, 96, 0]]
    assert corners == [15, 105, 210, 0]


def test_a_video_is_tiled_and_encoded_frame_by_frame(tmp_path):
    videos = [frames(40, 63, 95), frames(30, 33, 95, level=100), frames(20, 63, 95)]
    copy = sum(frame.nbytes for video in videos for frame in video)
    tracemalloc.start()
    try:
        path = write_video(tmp_path / "v.mp4", tile(framed(videos)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < copy / 2
    _, pictures = read_video(path)
    assert (len(pictures), pictures[0].shape) == (40, (126, 190, 3))
    assert pictures[0][48:62, 100:].max() < 16  # the margin of what was smaller


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "at least one frame"),
        ([np.zeros((4, 4, 3))], "uint8"),
        ([np.zeros((4, 4), dtype=np.uint8)], "uint8"),
        ([*frames(1), *frames(1, 32)], "different sizes"),
    ],
)
def test_unusable_frames(tmp_path, bad, message):
    with pytest.raises(ValueError, match=message):
        write_video(tmp_path / "v.mp4", bad)
    assert not list(tmp_path.iterdir())


def test_tiles_of_different_sizes():
    with pytest.raises(ValueError, match="one size"):
        tile([frames(1), frames(1, 32)])
