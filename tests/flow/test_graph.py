from dataclasses import replace

import pytest

from rlinf.errors import ConfigError
from rlinf.flow.graph import Flow, Stage


def embodied() -> Flow:
    flow = Flow("embodied")
    flow.stage("train", Stage("actor", "train", inputs=("trajectories",)))
    flow.loop(
        "rollout",
        Stage("env", "interact", inputs=("actions",), outputs=("observations", "trajectories")),
        Stage("policy", "generate", inputs=("observations",), outputs=("actions",)),
    )
    return flow


def test_order_follows_the_edges_and_not_the_order_of_declaration():
    assert [node.name for node in embodied().order()] == ["rollout", "train"]


def test_a_loop_feeds_the_next_node_and_not_itself():
    assert embodied().feeds() == {"train": ("rollout",), "rollout": ()}


def test_edges_connect_producer_and_consumer_by_name():
    edges = {
        edge.name: (edge.producer.component, edge.consumer.component) for edge in embodied().edges()
    }
    assert edges == {
        "trajectories": ("env", "actor"),
        "actions": ("policy", "env"),
        "observations": ("env", "policy"),
    }


def test_a_loop_is_one_node_with_all_its_components():
    rollout = embodied().order()[0]
    assert rollout.is_loop
    assert rollout.components == ("env", "policy")


def test_an_edge_without_a_producer_is_refused():
    flow = Flow("broken")
    flow.stage("train", Stage("actor", "train", inputs=("trajectories",)))
    with pytest.raises(ConfigError, match="'trajectories' has 0 producers and 1 consumers"):
        flow.order()


def test_two_producers_of_one_edge_are_refused():
    flow = embodied()
    flow.stage("more", Stage("other", "make", outputs=("trajectories",)))
    with pytest.raises(ConfigError, match="2 producers"):
        flow.edges()


def test_a_circle_outside_a_loop_is_refused():
    flow = Flow("circle")
    flow.stage("a", Stage("a", "run", inputs=("x",), outputs=("y",)))
    flow.stage("b", Stage("b", "run", inputs=("y",), outputs=("x",)))
    with pytest.raises(ConfigError, match="a, b feed each other in a circle"):
        flow.order()


def test_names_are_unique_and_a_loop_has_two_stages():
    flow = embodied()
    again = Stage("actor", "fit")
    with pytest.raises(ConfigError, match="two stages are called 'actor'; give one a key"):
        flow.stage("again", again)
    flow.stage("again", replace(again, key="actor.fit"))
    with pytest.raises(ConfigError, match="two nodes are called 'train'"):
        flow.stage("train", Stage("other", "train"))
    with pytest.raises(ConfigError, match="two or more stages"):
        flow.loop("alone", Stage("a", "run"))
