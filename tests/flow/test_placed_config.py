"""What a recipe says of the cluster that its components are placed on."""

import pytest

from rlinf.errors import ConfigError
from tests.runners.support import small_config


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("{src: 'actr:0', dst: 'env:0'}", r"names actr:0, which is no component.*mean `actor`"),
        ("{src: 'ActorGroup:0', dst: 'env:0'}", r"names Actor:0, .*mean `actor`"),
        ("{src: 'actor:0', dst: 'env:0-1'}", r"names env:1, and env has 1 process; nearest: env:0"),
    ],
)
def test_a_network_between_others_than_the_workers_is_refused(tmp_path, network, message):
    link = network.removesuffix("}") + ", delay_ms: 1}"
    with pytest.raises(ConfigError, match=message):
        small_config(tmp_path, f"cluster.net_emulation={{enabled: true, crossdc_pairs: [{link}]}}")
