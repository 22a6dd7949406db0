"""Device leases: first come first served, all or nothing, free when the holder dies."""

import itertools
import random

import pytest

from rlinf.scheduler import Channel, FlexiblePlacementStrategy
from rlinf.scheduler.services.leases import LeaseError, LeaseService
from rlinf.scheduler.transport.endpoint import Endpoint
from tests.scheduler.workers import Holder

SHARED = FlexiblePlacementStrategy([[0], [0], [0, 1]])


@pytest.fixture(scope="package")
def holders(cluster):
    group = Holder.create_group().launch(cluster, SHARED, "holders")
    yield group
    group._close()


def test_sole_use_of_shared_devices(holders):
    group = holders
    log = Channel.create("sharing-log")
    group.hold(log, 0.05).wait()
    events = [log.get() for _ in range(6)]
    log.close()
    for (rank, begin), (other, end) in zip(events[::2], events[1::2], strict=True):
        assert (begin, end) == ("in", "out")
        assert rank == other


def test_only_the_holder_releases(holders):
    group = holders
    group.execute_on(0).take().wait()
    with pytest.raises(LeaseError, match="held by"):
        group.execute_on(1).give().wait()
    group.execute_on(0).give().wait()
    with pytest.raises(LeaseError, match="they are free"):
        group.execute_on(0).give().wait()


def test_tickets_are_redeemed_in_their_order(holders, cluster):
    group = holders
    log = Channel.create("ticket-log")
    order = [2, 0, 1]
    tickets = {rank: cluster.reserve_lease(f"holders:{rank}", [0, 1]) for rank in order}
    calls = [group.execute_on(rank).redeem(tickets[rank], log) for rank in range(3)]
    for call in calls:
        call.wait()
    assert [log.get() for _ in range(3)] == order
    log.close()


def test_a_cancelled_ticket_lets_the_next_go(cluster):
    first, second = (cluster.reserve_lease(name, [0]) for name in ("a", "b"))
    first.cancel()
    first.cancel()
    with second:
        pass
    with pytest.raises(LeaseError, match="is over"):
        first.acquire()


def test_lease_waits_end(cluster, short_deadline):
    short_deadline()
    first, second = (cluster.reserve_lease(name, [0]) for name in ("a", "b"))
    first.acquire()
    with pytest.raises(TimeoutError, match=r"devices \[0\]"):
        second.acquire()
    first.release()


def test_closing_a_group_frees_its_devices(launch, cluster):
    group = launch(Holder, 1, "closing", placement_strategy=FlexiblePlacementStrategy([[0]]))
    group.take().wait()
    group._close()
    with cluster.reserve_lease("next", [0]):
        pass


def test_the_devices_of_a_dead_holder_are_free(launch, cluster, runtime):
    if runtime == "local":
        pytest.skip("a thread does not die alone")
    group = launch(Holder, 1, "dying", placement_strategy=FlexiblePlacementStrategy([[0]]))
    group.take().wait()
    group.die()
    with cluster.reserve_lease("next", [0]):
        pass


def make_service():
    return LeaseService(Endpoint(), lambda holder: None)


def who_holds(leases: LeaseService) -> dict[int, str]:
    granted = (ticket for ticket in leases._tickets.values() if ticket.granted)
    return {device: ticket.holder for ticket in granted for device in ticket.devices}


def test_a_set_is_granted_whole_and_in_turn():
    leases = make_service()
    one, both, other = (leases.reserve(n, d) for n, d in (("a", [0]), ("b", [0, 1]), ("c", [1])))
    assert leases.acquire(one) is None
    waits = leases.acquire(both), leases.acquire(other)
    assert not any(wait.done() for wait in waits)  # c must not overtake b on device 1
    leases.release(one)
    assert [wait.done() for wait in waits] == [True, False]
    leases.release(both)
    assert waits[1].done()


def test_disjoint_sets_do_not_wait():
    leases = make_service()
    assert leases.lock("a", [0]) is None
    assert leases.lock("b", [1]) is None
    assert who_holds(leases) == {0: "a", 1: "b"}


def test_nesting_is_counted():
    leases = make_service()
    for _ in range(3):
        assert leases.lock("a", [0, 1]) is None
    waiting = leases.lock("b", [0])
    leases.unlock("a", [0, 1])
    leases.unlock("a", [0, 1])
    assert not waiting.done()
    leases.unlock("a", [0, 1])
    assert waiting.done()


def test_waiting_while_holding_is_refused():
    leases = make_service()
    leases.lock("a", [0])
    leases.lock("b", [1])
    for more in ([0, 1], [1]):
        with pytest.raises(LeaseError, match="deadlock"):
            leases.lock("a", more)
    leases.unlock("a", [0])
    leases.unlock("b", [1])
    assert leases.lock("c", [0, 1]) is None


def test_a_lock_inside_an_own_waiting_ticket_does_not_wait_for_itself():
    leases = make_service()
    blocking = leases.reserve("other", [0])
    leases.acquire(blocking)
    own = leases.reserve("a", [0])
    inner = leases.lock("a", [0])
    leases.release(blocking)
    assert inner.done()
    assert leases.acquire(own) is None


def test_no_overlap_of_sets_deadlocks():
    for seed in range(200):
        chooser = random.Random(seed)
        leases = make_service()
        names = [f"w{i}" for i in range(6)]
        sets = {name: chooser.sample(range(4), chooser.randint(1, 3)) for name in names}
        remaining = dict.fromkeys(names, 10)
        waiting, holding = {}, set()
        for _ in itertools.count():
            for name in [n for n, future in waiting.items() if future.done()]:
                del waiting[name]
                holding.add(name)
            idle = [n for n in names if remaining[n] and n not in waiting and n not in holding]
            if not idle and not holding:
                assert not waiting, f"deadlock with seed {seed}: {sets}"
                break
            name = chooser.choice([*idle, *sorted(holding)])
            if name in holding:
                holding.discard(name)
                leases.unlock(name, sets[name])
                continue
            remaining[name] -= 1
            future = leases.lock(name, sets[name])
            if future is None:
                holding.add(name)
            else:
                waiting[name] = future
            owners = who_holds(leases)
            for holder in holding:
                assert all(owners[device] == holder for device in sets[holder])
