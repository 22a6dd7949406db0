"""What the conformance suite of the engines works on: a tiny model, and what it must say."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from rlinf.conformance import require
from rlinf.data.pictures import VISION_TOKENS, Pictures
from rlinf.data.sequences import Completion
from rlinf.engines.config import EngineConfig, SamplingConfig
from rlinf.engines.conformance_pictures import Sight, seeing_architecture
from rlinf.engines.protocol import (
    Engine,
    FinishedCompletion,
    GenerationRequest,
    KeptCache,
    Lora,
    ModelSource,
)
from rlinf.models.adapters import adapter_file_name, is_adapter
from rlinf.models.language import model_class, without_bars

Kind = Literal["tied", "untied", "experts", "adapter", "pictures"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Tied and untied embeddings, a mixture of experts, a LoRA adapter, and a model that reads
pictures."""

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+-*/=()., !?:"
END = len(LETTERS)
VOCABULARY = END + 1
CONTEXT = 1024
TOLERANCE = 1e-5
"""Largest difference of a float32 log-prob from that of a full forward pass."""
_LORA = Lora(rank=8, alpha=16.0)


class Subject:
    """An engine, and a model of equal weights that its answers are compared with.

    With ``sight`` every prompt begins with a picture.
    """

    def __init__(self, engine: Engine, model: Any, sight: Sight | None = None) -> None:
        self.engine, self.model, self.sight = engine, model, sight
        self._random = torch.Generator().manual_seed(17)
        self._requests = 0

    def update(self) -> None:
        """Change the weights of the model and send them to the engine, as the next version.

        The changes are large, but matrices do not grow by them: rounding stays what it is.
        """
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    noise = torch.randn(parameter.shape, generator=self._random)
                    parameter.mul_(0.7 if parameter.dim() > 1 else 1.0).add_(0.05 * noise)
        if self.sight is not None:
            self.sight.join(self.model)
        self.engine.update_weights(self.weights(), self.engine.version + 1)

    def weights(self) -> list[tuple[str, Tensor]]:
        """What a trainer sends: adapters alone if there are any."""
        state = self.model.state_dict()
        if any(map(is_adapter, state)):
            return [(adapter_file_name(n), v) for n, v in state.items() if is_adapter(n)]
        tied = self.model.config.tie_word_embeddings
        return [(n, v) for n, v in state.items() if not (tied and n == "lm_head.weight")]

    def request(
        self,
        prompt: np.ndarray,
        *,
        pictures: Pictures | None = None,
        seed: int = 0,
        partial: Completion | None = None,
        cache: KeptCache | None = None,
        **sampling: Any,
    ) -> GenerationRequest:
        """A request with a fresh number; it does not stop at end tokens unless told.

        None for ``pictures``: the prompt gets one if the model reads any.
        """
        self._requests += 1
        if pictures is None:
            prompt, pictures = (prompt, ()) if self.sight is None else self.sight.prompt(prompt)
        return GenerationRequest(
            request_id=self._requests,
            prompt_tokens=prompt,
            pictures=pictures,
            seed=seed,
            sampling=SamplingConfig(**{"stop_token_ids": (), "max_new_tokens": 12, **sampling}),
            partial=partial,
            cache=cache,
        )

    def requests(self, count: int, **sampling: Any) -> list[GenerationRequest]:
        """Requests in groups of three with equal prompts of unequal lengths."""
        return [
            self.request(prompt(5 + 4 * (number // 3), number // 3), seed=number, **sampling)
            for number in range(count)
        ]

    @property
    def long(self) -> int:
        """Tokens of sequences that have not ended when they are looked at."""
        return 900 if self.engine.generates_between_steps else 16

    def begin(self, requests: Sequence[GenerationRequest]) -> None:
        """Submit requests, and step until all have tokens; none may end."""
        for request in requests:
            self.engine.submit(request)
        finished: list[FinishedCompletion] = []
        if self.engine.generates_between_steps:
            while not finished and min(self.engine.progress().values()) == 0:
                finished += self.engine.step()
        else:
            finished = [item for _ in range(7) for item in self.engine.step()]
        require(not finished, f"a sequence of {self.long} tokens ended in the first steps")

    def run_out(self) -> list[FinishedCompletion]:
        """Step until nothing is unfinished."""
        finished: list[FinishedCompletion] = []
        while self.engine.unfinished:
            finished += self.engine.step()
        return finished

    def scores(
        self, request: GenerationRequest, tokens: np.ndarray, model: Any = None
    ) -> np.ndarray:
        """[L] log-probs of a completion by one full forward pass of the model, or of another."""
        text = np.concatenate([request.prompt_tokens, tokens])
        scorer = self.model if model is None else model
        arguments = {"input_ids": torch.from_numpy(text)[None]}
        if self.sight is not None and request.pictures:
            arguments = self.sight.arguments(text, request.pictures)
        with torch.no_grad():
            logits = scorer(**arguments).logits[0]
        log_probs = (logits / request.sampling.temperature).log_softmax(-1)
        positions = torch.arange(len(request.prompt_tokens) - 1, len(text) - 1)
        found: np.ndarray = log_probs[positions, torch.from_numpy(tokens)].numpy()
        return found

    def error(
        self, asked: Sequence[GenerationRequest], ended: Sequence[FinishedCompletion]
    ) -> float:
        """Largest difference between what the engine reports and what the model says."""
        by_id = {item.request_id: item.completion for item in ended}
        found = [(request, by_id[request.request_id]) for request in asked]
        return max(float(np.abs(self.scores(r, c.tokens) - c.log_probs).max()) for r, c in found)

    def require_scores(
        self, asked: Sequence[GenerationRequest], ended: Sequence[FinishedCompletion], where: str
    ) -> float:
        """:meth:`error`, which must be within the tolerance."""
        return require_small(self.error(asked, ended), where)


def require_small(error: float, where: str) -> float:
    """The largest difference of some log-probs, which must be within the tolerance."""
    require(error <= TOLERANCE, f"log-probs differ by {error:.1e} from a full forward {where}")
    return error


def prompt(length: int, seed: int) -> np.ndarray:
    """[length] random tokens."""
    return np.random.default_rng((5, seed)).integers(0, END, length)


@contextmanager
def open_subject(config: EngineConfig, kind: Kind) -> Iterator[Subject]:
    """Build the engine of ``config`` on a tiny model, in float32."""
    without_bars()
    model = _tiny_model(kind)
    tokenizer = _tokenizer(VISION_TOKENS if kind == "pictures" else ())
    with tempfile.TemporaryDirectory(prefix="rlinf-check-") as folder:
        sight = Sight(Path(folder), tokenizer, VOCABULARY) if kind == "pictures" else None
        if sight is not None:
            sight.join(model)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        source = ModelSource(path=Path(folder))
        if kind == "adapter":
            model = _with_adapter(model)
            module = copy.deepcopy(model)
            source = ModelSource(path=Path(folder), module=module, lora=_LORA)
            model = model.get_base_model()
        changes = {"dtype": "float32", "max_running_requests": 6}
        with config.model_copy(update=changes).build(source) as engine:
            yield Subject(engine, model, sight)


def _tiny_model(kind: Kind) -> Any:
    from transformers import Qwen2Config, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": kind in ("tied", "adapter"),
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": END,
    }
    config: Any
    if kind == "experts":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        config = Qwen3MoeConfig(**sizes, **experts, head_dim=32)
    elif kind == "pictures":
        config = seeing_architecture(sizes, VOCABULARY)
    else:
        config = Qwen2Config(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(23)
        return model_class(kind == "pictures").from_config(config, dtype=torch.float32).eval()


def _with_adapter(model: Any) -> Any:
    import peft

    settings = peft.LoraConfig(
        r=_LORA.rank,
        lora_alpha=int(_LORA.alpha),
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(29)
        return peft.get_peft_model(copy.deepcopy(model), settings).eval()


def _tokenizer(added: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Bytes are written as letters; the space is one of those that are written as another letter.
    names = {letter.replace(" ", "Ġ"): number for number, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab={**names, "<end>": END}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>"
    )
    found.add_tokens(list(added), special_tokens=True)
    return found
