"""Which tasks there are, in the form of the real file."""
# ruff: noqa: C408

from collections import OrderedDict

ATOMIC_TASK_DATASETS = OrderedDict(
    CloseDrawer=dict(pretrain=dict(human_path="v1.0/pretrain/atomic/CloseDrawer"), horizon=450),
    OpenDrawer=dict(pretrain=dict(human_path="v1.0/pretrain/atomic/OpenDrawer"), horizon=750),
)

COMPOSITE_TASK_DATASETS = OrderedDict(
    AddIceCubes=dict(pretrain=dict(human_path="v1.0/pretrain/composite/AddIceCubes"), horizon=1650),
)

TASK_SET_REGISTRY = dict(all_tasks=list(ATOMIC_TASK_DATASETS) + list(COMPOSITE_TASK_DATASETS))
