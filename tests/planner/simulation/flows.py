"""Small flows with round numbers."""

from rlinf.flow.graph import Flow, Stage
from rlinf.flow.plan import ComponentPlan, Plan
from rlinf.planner.cluster_shape import ClusterShape, NodeGroup
from rlinf.planner.profile import ComponentProfile, Measurement, Profile


def chain(*names):
    flow = Flow("chain")
    for i, name in enumerate(names):
        inputs = (f"edge{i}",) if i else ()
        outputs = (f"edge{i + 1}",) if i + 1 < len(names) else ()
        flow.stage(name, Stage(name, "work", inputs, outputs))
    return flow


def component(per_item, *, devices=(1, 2, 4), items=(1, 2, 4, 8), fixed=0.0, **values):
    """Perfect scaling: ``fixed + per_item · items / devices`` seconds."""
    return ComponentProfile(
        measurements=tuple(
            Measurement(items=n, devices=d, seconds=fixed + per_item * n / d, origin="formula")
            for d in devices
            for n in items
        ),
        **values,
    )


def profile(synchronisation_seconds=0.0, **components):
    return Profile(
        hardware="none",
        model="none",
        config="none",
        synchronisation_seconds=synchronisation_seconds,
        components=components,
    )


def cluster(devices, **values):
    return ClusterShape(groups=(NodeGroup(nodes=1, devices_per_node=devices, **values),))


def placed(**components):
    """A plan from devices, or (devices, residency)."""
    plans = {}
    for name, given in components.items():
        devices, *residency = given if isinstance(given[0], tuple) else (given,)
        plans[name] = ComponentPlan(
            devices=devices,
            processes=len(devices),
            residency=residency[0] if residency else "resident",
        )
    return Plan(components=plans)
