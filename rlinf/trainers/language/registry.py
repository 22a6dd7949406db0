"""Which trainers of language models exist: a literal table, and entry points of packages outside.

A package adds a trainer by an entry point in the group ``rlinf.trainers`` that names its config
class, a subclass of :class:`~rlinf.trainers.language.config.LanguageTrainerConfig`. A trainer may
divide the model over ranks in any way (tensors, layers, sequences, experts): what it takes and
gives back are whole batches and whole weights, on every rank.
"""

from __future__ import annotations

from rlinf.config.registry import Registry
from rlinf.trainers.language.config import LanguageTrainerConfig

TRAINERS = {
    "fsdp": "rlinf.trainers.language.config:FSDPTrainerConfig",
}

REGISTRY = Registry("trainer", "rlinf.trainers", TRAINERS, LanguageTrainerConfig)
