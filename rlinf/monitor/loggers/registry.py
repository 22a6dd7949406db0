"""Which loggers exist: a literal table, and entry points of packages outside.

A package adds a logger by an entry point in the group ``rlinf.loggers`` that names a subclass of
:class:`~rlinf.monitor.loggers.base.MetricLogger`. To import a logger does not import the service
behind it.
"""

from __future__ import annotations

from rlinf.config.registry import Registry
from rlinf.monitor.loggers.base import MetricLogger

LOGGERS = {
    "jsonl": "rlinf.monitor.loggers.jsonl:JsonlLogger",
    "tensorboard": "rlinf.monitor.loggers.tensorboard:TensorBoardLogger",
    "wandb": "rlinf.monitor.loggers.wandb:WandbLogger",
    "swanlab": "rlinf.monitor.loggers.swanlab:SwanLabLogger",
    "mlflow": "rlinf.monitor.loggers.mlflow:MlflowLogger",
}

REGISTRY: Registry[MetricLogger] = Registry(
    "logger",
    "rlinf.loggers",
    LOGGERS,
    MetricLogger,  # type: ignore[type-abstract]  # it is compared with, not built
)
