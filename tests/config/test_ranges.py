"""Numbers of devices as text."""

import pytest

from rlinf.config.ranges import device_ranges, ranges_of


@pytest.mark.parametrize(
    ("devices", "text"), [([0], "0"), ([3, 1, 0, 2, 6], "0-3,6"), ([0, 2], "0,2"), ([], "")]
)
def test_devices_are_written_as_ranges(devices, text):
    assert device_ranges(devices) == text


def test_runs_of_devices_keep_their_order():
    assert ranges_of([4, 5, 0, 1, 2]) == [(4, 6), (0, 3)]
