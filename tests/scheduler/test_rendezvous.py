"""Where processes meet: who can reach it, and who is heard."""

from __future__ import annotations

import psutil
import pytest

from rlinf.scheduler.transport import rendezvous
from rlinf.scheduler.transport.rendezvous import listen_at, meet, open_place

pytest.importorskip("torch")


def listening() -> set[tuple[str, int]]:
    """Addresses at which this process can be reached."""
    found = psutil.Process().net_connections("inet")
    return {(str(c.laddr.ip), int(c.laddr.port)) for c in found if c.status == "LISTEN"}


def test_a_place_is_on_loopback_and_the_store_listens_nowhere_else() -> None:
    before = listening()
    place = open_place()
    opened = listening() - before
    assert {f"{ip}:{port}" for ip, port in opened} == {place}
    assert {ip for ip, _ in opened} == {"127.0.0.1"}
    served = meet(place, 20)
    other = meet(place, 20)
    other.set("word", "from the other")
    assert served.get("word") == b"from the other"
    assert listening() - before == opened


def test_of_several_nodes_the_address_of_this_one_is_listened_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rendezvous, "_own_ip", "127.0.0.1")
    listen_at("127.0.0.2")
    before = listening()
    place = open_place()
    assert {ip for ip, _ in listening() - before} == {"127.0.0.2"}
    served, other = meet(place, 20), meet(place, 20)
    other.set("word", "heard")
    assert served.get("word") == b"heard"
    listen_at(None)
    assert open_place().startswith("127.0.0.1:")


@pytest.mark.parametrize("cluster", ["ray"], indirect=True, scope="package")
def test_ranks_that_train_listen_on_loopback_alone(launch) -> None:
    from tests.scheduler.training_ranks import Rank

    ranks = launch(Rank, 2, "meeting ranks")
    (place,) = ranks.execute_on(0).meeting().wait()
    found = ranks.join(place).wait()
    assert [total for total, _, _ in found] == [3.0, 3.0]
    opened = {ip for _, addresses, _ in found for ip, _ in addresses}
    assert opened == {"127.0.0.1"}
    # Also where the name of the machine is that of another address of it.
    assert {interface for _, _, interface in found} == {rendezvous.loopback_interface()}
