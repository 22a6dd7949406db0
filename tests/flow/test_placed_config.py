"""What a recipe says of the cluster that its components are placed on."""

import pytest

from rlinf.cli.main import main
from rlinf.errors import ConfigError
from tests.runners.support import small_config


def slow(link: str) -> str:
    return f"cluster.net_emulation={{enabled: true, crossdc_pairs: [{link}]}}"


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
        small_config(tmp_path, slow(link))


def test_no_plan_is_looked_for_over_slow_links(tmp_path, capsys):
    words = slow("{src: 'actor:0', dst: 'env:0', delay_ms: 1}")
    assert small_config(tmp_path, words).cluster.slow_links() is not None
    told = "slows links, of which nothing is known where plans are compared"
    with pytest.raises(ConfigError, match=told):
        small_config(tmp_path, words, "cluster.plan=auto")
    assert main(["plan", "quickstart", words]) == 2
    assert told in capsys.readouterr().err
