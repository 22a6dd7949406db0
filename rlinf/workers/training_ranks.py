"""What the workers share that train: ranks that meet, their state, and batches of answers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from rlinf.algorithms.batch import Batch
from rlinf.algorithms.objective import PolicyObjective
from rlinf.algorithms.protocol import Algorithm
from rlinf.checkpoint.manifest import FileRecord, record_file
from rlinf.data.pictures import PictureReader
from rlinf.data.sequences import PromptGroup, assemble_sequences
from rlinf.errors import in_section
from rlinf.flow.stage_worker import StageWorker
from rlinf.flow.stream import InputStream
from rlinf.models.language import build_language_model, picture_reader
from rlinf.models.language_config import LanguageModelConfig
from rlinf.scheduler.process import own_device, require_process
from rlinf.scheduler.services.shared_directory import Destination, WrittenFiles
from rlinf.scheduler.transport.rendezvous import meet, open_place
from rlinf.trainers.language_trainers import save_pretrained, shared_pictures
from rlinf.trainers.ranks import Ranks
from rlinf.trainers.trainer import Trainer
from rlinf.weight_sync.protocol import Parties, WeightSender
from rlinf.workers.config.answering import PartialRolloutConfig
from rlinf.workers.context import WorkerContext

Made = TypeVar("Made")


class TrainingWorker(StageWorker):
    """One rank of a trainer."""

    section: ClassVar[str] = "actor"
    """Of the config; name of its directory in a checkpoint."""
    _trainer: Trainer

    def __init__(self) -> None:
        super().__init__()
        self._ranks: Ranks | None = None

    def meeting(self) -> str:
        """Place at which the ranks of the group can meet: this one listens there."""
        return open_place()

    def _meet(self, rendezvous: str | None) -> Ranks:
        """Join the other ranks; ``rendezvous`` is :meth:`meeting` of rank 0, None for one rank."""
        self._ranks = self._joined(Ranks, rendezvous)
        return self._ranks

    def _joined(self, make: Callable[..., Made], rendezvous: str | None) -> Made:
        """What stands for this rank among the others: ``make`` takes arguments as :class:`Ranks`
        does."""
        seconds = require_process().deadline_seconds
        return make(
            self._rank,
            self._world_size,
            device=self._device(),
            store=None if rendezvous is None else meet(rendezvous, seconds),
            timeout_s=seconds,
        )

    def _device(self) -> str:
        device = own_device()
        if ":" in device or device == "cpu" or self._world_size == 1:
            return device
        return f"{device}:{os.environ.get('LOCAL_RANK', '0')}"

    @property
    def _has_model(self) -> bool:
        """False on a rank without a part of the model, in a run whose ranks change."""
        return True

    def onload(self) -> None:
        """Bring to the device what :meth:`offload` took from it."""
        if self._has_model:
            self._trainer.onload()

    def offload(self) -> None:
        """Free the device until the next training phase."""
        if self._has_model:
            self._trainer.offload()

    def state(self, *, whole: bool = True) -> dict[str, Any] | None:
        """Everything that training needs; rank 0 gives it. :meth:`save_parts` writes what is not
        whole."""
        state = self._trainer.state_dict() if whole and self._has_model else None
        return {"trainer": state} if self._rank == 0 else None

    def save_parts(self, checkpoint: Path) -> dict[str, FileRecord]:
        """Write this rank's part of the trainer's state into the directory of a checkpoint.

        Returns:
            Records of the files that it wrote, by their names in the checkpoint.

        Raises:
            OSError: A rank could not write; on all ranks.
        """
        if not self._has_model:
            return {}
        written = self._trainer.save_sharded(checkpoint / self.section)
        return {path.relative_to(checkpoint).as_posix(): record_file(path) for path in written}

    def load_state(self, state: dict[str, Any], checkpoint: Path | None = None) -> None:
        """Continue from :meth:`state`, or from what :meth:`save_parts` wrote into a checkpoint."""
        if self._has_model and state["trainer"] is not None:
            self._trainer.load_state_dict(state["trainer"])
        elif self._has_model:
            assert checkpoint is not None
            self._trainer.load_sharded(checkpoint / self.section)

    def close(self) -> None:
        """Give the memory back, and leave the other ranks."""
        if hasattr(self, "_trainer") and self._has_model:
            self._trainer.close()
        if self._ranks is not None:
            self._ranks.close()


class WeightSendingWorker(TrainingWorker):
    """One rank of the trainer of what acts, or answers, with weights that it is sent."""

    _config: Any
    _weights: WeightSender[Any] | None = None

    def _open_weights(self) -> None:
        """Let rank 0 send weights to every rollout worker."""
        if self._rank == 0:
            receivers = self._config.world_size("rollout")
            parties = Parties(sender="actor", receiver="rollout", receivers=receivers)
            self._weights = self._config.weight_sync.build_sender(self, parties)

    def send_weights(self) -> int:
        """Send the weights from rank 0 to every rollout worker; returns their version."""
        if not self._has_model:
            return self._trainer.version
        weights = self._trainer.weights()
        if self._weights is not None:
            host = self._weights.takes_host_tensors and self._trainer.gives_copies
            sent = {name: tensor.to("cpu") if host else tensor for name, tensor in weights}
            self._weights.send(sent, self._trainer.version)
        else:
            # Takes part in gathering, and keeps none: they would be the whole model.
            deque(weights, maxlen=0)
        return self._trainer.version

    def close(self) -> None:
        """Give back what weights are sent from, and leave the other ranks."""
        if self._weights is not None:
            self._weights.close()
        super().close()


class LanguageWorker(TrainingWorker):
    """One rank of the trainer of a language model."""

    def __init__(self, config: Any, context: WorkerContext) -> None:
        super().__init__()
        self._config, self._context = config, context

    def _build_model(self) -> Any:
        """The model that the run begins with; its tokenizer is kept."""
        config, source = self._config, self._source
        with in_section("model"):
            model, self._tokenizer = build_language_model(source, seed=config.seed)
        return model

    @property
    def _source(self) -> LanguageModelConfig:
        found: LanguageModelConfig = self._context.model or self._config.model
        return found

    def _picture_reader(self) -> PictureReader | None:
        """What reads the pictures of prompts; None where these have none."""
        if not self._config.has_pictures:
            return None
        with in_section("model"):
            return picture_reader(self._source, self._tokenizer)

    def save_model(self, wanted: Destination) -> WrittenFiles | None:
        """Write model and tokenizer in the format of transformers; rank 0 gives what to bring."""
        if not self._has_model:
            return None
        place = wanted.place()
        self._write(place)
        return None if self._rank else WrittenFiles.at(place)

    def _write(self, directory: Path) -> None:
        save_pretrained(self._trainer, directory, self._tokenizer, self._source.path)


def read_batch(stream: InputStream, *, pad_id: int, version: int) -> Batch:
    """What a stream holds: the scored groups of all positions, or a batch that was made of them.

    ``version`` is of the weights that training begins with.
    """
    found = {item.source: item.payload for item in stream}
    first = found[min(found)]
    if isinstance(first, Batch):
        return first
    return token_batch([found[position] for position in sorted(found)], pad_id, version)


def token_batch(groups: Sequence[PromptGroup], pad_id: int, version: int) -> Batch:
    """Tensors of scored groups, in their order."""
    columns = assemble_sequences(groups, pad_id=pad_id)
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    inputs = {name: tensors.pop(name) for name in ("input_ids", "attention_mask")}
    pictures = shared_pictures(
        [group.pictures for group in groups], [len(group.completions) for group in groups]
    )
    return Batch(inputs=inputs, **tensors, version=version, pictures=pictures)


def count_no_old_tokens(algorithm: Algorithm, partial: PartialRolloutConfig | None) -> int | None:
    """Let an algorithm train on no token that ``rollout.partial`` calls too old; the bound, if any.

    It leaves them out itself, as its advantages are normalised, and its critic learns, over those
    that count.
    """
    if partial is None or partial.too_old != "mask":
        return None
    if isinstance(algorithm, PolicyObjective):
        algorithm.max_token_age = partial.max_token_staleness
    return partial.max_token_staleness


def without_old_tokens(batch: Batch, bound: int) -> Batch:
    """Let no token count in the loss whose weights are more than ``bound`` phases old."""
    return replace(batch, mask=batch.mask * ~_old(batch, bound))


def old_tokens(batch: Batch, bound: int) -> int:
    """How many tokens of a batch would count, but are more than ``bound`` phases old."""
    return int((_old(batch, bound) & (batch.mask > 0)).sum())


def _old(batch: Batch, bound: int) -> torch.Tensor:
    age = batch.staleness()
    if age is None:
        raise ValueError("the age of tokens needs the version in the batch")
    return age > bound
