"""Configuration of the engines that generate text, and of how they sample; imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from rlinf.config.base import StrictModel
from rlinf.config.component import illegal
from rlinf.config.registry import Registry, load_attribute
from rlinf.errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from rlinf.engines.protocol import Engine, ModelSource

TokenId = Annotated[int, Field(ge=0)]


class SamplingConfig(StrictModel):
    """How the tokens of a completion are drawn.

    The order is: repetition penalty, ban of stop tokens before ``min_new_tokens``, temperature,
    ``top_k``, ``top_p``. Recorded log-probs are those of softmax(logits / temperature) over the
    whole vocabulary, which a trainer can recompute; penalty, ban, ``top_k`` and ``top_p`` change
    which tokens are drawn, not how they are scored.
    """

    only_with: ClassVar = dict.fromkeys(("temperature", "top_k", "top_p"), "greedy: false")

    temperature: float = Field(default=1.0, gt=0)
    """Divisor of the logits."""
    top_k: int = Field(default=0, ge=0)
    """Draw from that many most likely tokens; 0: from all."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the fewest most likely tokens whose probabilities sum to this."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Positive logits of tokens that occurred, in the prompt too, are divided by it and negative
    ones multiplied; 1: off."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Length at which a completion is cut off."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Length before which it cannot end, nor a turn of it by a call."""
    stop_token_ids: tuple[TokenId, ...] | None = None
    """Tokens that end a completion; null: the end tokens of the model; an empty list: none."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion."""
    greedy: bool = False
    """Take the most likely token each time; needs temperature 1, at which it is scored."""

    @field_validator("temperature", mode="before")
    @classmethod
    def _refuse_zero(cls, value: Any) -> Any:
        if value == 0 and not isinstance(value, bool):
            raise ValueError("must be > 0; the most likely token each time is `greedy: true`")
        return value

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise illegal(
                "min_new_tokens",
                f"{self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}",
                hint=f"nearest: {self.max_new_tokens}",
            )
        return self

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from less than softmax(logits / temperature)."""
        return bool(self.top_k) or self.top_p < 1 or self.repetition_penalty != 1


class Refusal(NamedTuple):
    """What of a sampling an engine cannot do, or cannot score as a trainer does, and why."""

    key: str  # of the sampling
    why: str
    hint: str


class EngineProcessConfig(StrictModel):
    """When the process of an engine counts as lost, and how often it is replaced."""

    max_restarts: int = Field(default=3, ge=0)
    """Times that it is replaced before the run stops."""
    step_deadline: float = Field(default=300.0, gt=0, le=1e9)
    """Seconds that a step, or taking new weights, may last."""
    start_deadline: float = Field(default=600.0, gt=0, le=1e9)
    """Seconds that building the engine may last."""


class EngineConfig(StrictModel):
    """Base of every engine's config section."""

    implementation: ClassVar[str]
    """``module:Class`` of the engine, imported when it is built."""
    package: ClassVar[str]
    """Import name of the package behind it."""
    extra: ClassVar[str]
    """Extra of this project that installs the package."""
    takes_module: ClassVar[bool] = False
    """Whether the engine can compute with a module that it is given, and not from files alone."""
    reads_pictures: ClassVar[bool] = False
    """Whether prompts may have pictures."""
    tells_progress: ClassVar[bool] = True
    """Whether the engine can say how long unfinished answers are."""

    type: str
    """Which engine this section configures."""
    max_running_requests: int = Field(default=64, ge=1)
    """Sequences that are generated at the same time; more wait."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of weights and caches; auto: that of the model."""
    process: EngineProcessConfig | None = None
    """Generate in a process of its own, which is replaced where it dies or hangs; `true` is the
    section with its defaults; null: in the process of the worker."""

    @field_validator("process", mode="before")
    @classmethod
    def _accept_switch(cls, value: Any) -> Any:
        switch: dict[bool, Any] = {True: {}, False: None}
        return switch[value] if isinstance(value, bool) else value

    @property
    def context(self) -> int | None:
        """Longest prompt plus completion, where the section bounds it."""
        return None

    @property
    def devices_per_engine(self) -> int:
        """Devices that one engine computes on."""
        return 1

    @property
    def engine_class(self) -> str:
        """``module:Class`` of the engine that this section asks for, the process aside."""
        return self.implementation

    @property
    def generates_between_steps(self) -> bool:
        """Whether the engine goes on generating while no call is being made."""
        return False

    @property
    def shares_module(self) -> bool:
        """Whether the engine computes with the caller's own module."""
        return self.takes_module and self.process is None

    @property
    def unloaded(self) -> str | None:
        """Key by which the engine begins without the weights of its model, which have to be sent;
        None: it loads them."""
        return None

    @property
    def loading(self) -> Self:
        """The section where no weights are ever sent: the engine loads those of its model."""
        key = self.unloaded
        return self if key is None else self.model_copy(update={key: self.unwritten(key)})

    def unscored(self, sampling: SamplingConfig) -> Refusal | None:
        """What of ``sampling`` makes the engine report other log-probs than those of
        softmax(logits / temperature); None: nothing."""
        del sampling
        return None

    def unserved(self, sampling: SamplingConfig) -> Refusal | None:
        """What of ``sampling`` the engine does otherwise than :class:`SamplingConfig` says, scored
        or not; None: nothing."""
        del sampling
        return None

    def check_served(self, sampling: SamplingConfig) -> None:
        """Refuse, by a ConfigError, what is :meth:`unserved`."""
        if (found := self.unserved(sampling)) is not None:
            raise ConfigError(f"{found.why}; {found.hint}", key=found.key)

    def check_scored(self, sampling: SamplingConfig) -> None:
        """Refuse, by a ConfigError, what is :meth:`unscored`."""
        if (found := self.unscored(sampling)) is not None:
            raise ConfigError(f"{found.why}; {found.hint}", key=found.key)

    def check(self) -> None:
        """Refuse an engine whose package is not installed."""
        if find_spec(self.package) is None:
            raise MissingPackageError(self.package, self.extra, f"engine `{self.type}`")
        super().check()

    def build(self, source: ModelSource) -> Engine:
        """The engine, with the weights of ``source`` as version 0.

        Raises:
            ConfigError: It cannot serve this model.
            MissingPackageError: Its package is not installed.
        """
        self.check()
        config = self
        if self.dtype == "auto" and source.dtype is not None:
            config = self.model_copy(update={"dtype": source.dtype})
        supervised = "rlinf.engines.process.engine:ProcessEngine"
        implementation = self.engine_class if self.process is None else supervised
        engine: Engine = load_attribute(implementation)(config, source)
        return engine


class HFEngineConfig(EngineConfig):
    """Continuous batching over a transformers model, in the process of the caller."""

    implementation = "rlinf.engines.hf:HFEngine"
    package = "transformers"
    extra = "language"
    takes_module = True
    reads_pictures = True
    only_with: ClassVar = {
        "block_size": "deterministic: true",
        "max_prefill_tokens": "deterministic: false",
    }
    type: Literal["hf"] = "hf"
    """Which engine this section configures."""
    max_prefill_tokens: int = Field(default=8192, ge=1)
    """Tokens, padding included, of one forward pass over prompts; a longer prompt has its own."""
    on_update: Literal["recompute", "keep"] = "recompute"
    """What becomes of the caches of running sequences when weights change: `recompute` computes
    them under the new weights, so that later log-probs are those of the new weights; `keep` saves
    the work and scores later tokens under a mixture of both."""
    deterministic: bool = False
    """Compute in blocks of a fixed shape: a sequence is then bitwise the same whatever runs beside
    it, and when it is aborted and resumed. Costs speed."""
    block_size: int = Field(default=16, ge=1)
    """Sequences per forward pass of the deterministic mode."""


class VLLMEngineConfig(EngineConfig):
    """vLLM, on CUDA or CPU: in steps of the caller, in its process, or in the background."""

    implementation = "rlinf.engines.vllm.synchronous:VLLMEngine"
    package = "vllm"
    extra = "vllm"
    type: Literal["vllm"] = "vllm"
    """Which engine this section configures."""
    asynchronous: bool = False
    """Generate in the background, in a process of vLLM's own, also while the caller does something
    else; false: in the process of the caller, within its calls alone."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share each layer."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Devices that share the stack of layers."""
    gpu_memory_utilization: float = Field(default=0.6, gt=0, le=1)
    """Fraction of device memory for weights and caches; on CPU of no effect."""
    cpu_cache_gib: float = Field(default=1.0, gt=0)
    """Size of the KV cache in GiB, rounded, where there is no accelerator."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt plus completion; null: that of the model."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens of one forward pass; null: chosen by vLLM. On CPU at least max_model_len."""
    enforce_eager: bool = True
    """Neither compile nor capture graphs: starts quicker, runs slower on CUDA."""
    enable_prefix_caching: bool = True
    """Share the caches of equal prompt beginnings."""
    enable_chunked_prefill: bool = True
    """Let long prompts share forward passes with running sequences; on CPU it is always off."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy`: start with random weights; the first synchronisation brings the real ones, so it is
    for training."""
    log_probs: Literal["processed", "raw"] = "processed"
    """Which log-probs vLLM reports. `processed`: after temperature and filters, right for any
    temperature without top_k, top_p, repetition_penalty and min_new_tokens. `raw`: before both,
    right for temperature 1 with any of them. Training on other combinations is refused."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's `EngineArgs`, by their names there."""

    @property
    def context(self) -> int | None:
        """See :attr:`EngineConfig.context`."""
        return self.max_model_len

    @property
    def engine_class(self) -> str:
        """See :attr:`EngineConfig.engine_class`."""
        background = "rlinf.engines.vllm.asynchronous:AsyncVLLMEngine"
        return background if self.asynchronous else self.implementation

    @property
    def generates_between_steps(self) -> bool:
        """See :attr:`EngineConfig.generates_between_steps`."""
        return self.asynchronous

    @property
    def devices_per_engine(self) -> int:
        """Devices that one engine computes on."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def unloaded(self) -> str | None:
        """See :attr:`EngineConfig.unloaded`."""
        return "load_format" if self.load_format == "dummy" else None

    def unscored(self, sampling: SamplingConfig) -> Refusal | None:
        """See :attr:`log_probs`."""
        if self.log_probs == "raw":
            if sampling.temperature == 1:
                return None
            why = f"{sampling.temperature} is not seen by vLLM's raw log-probs"
            hint = "nearest: 1.0, or log_probs: processed for the engine"
            return Refusal("temperature", why, hint)
        keys = ("top_k", "top_p", "repetition_penalty", "min_new_tokens")
        for key, default in _changed(sampling, keys):
            why = "changes what vLLM reports as processed log-probs"
            hint = f"nearest: {default}, or log_probs: raw for the engine with temperature 1"
            return Refusal(key, why, hint)
        return None

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        taken = sorted(set(self.options) & _OWN_VLLM_ARGUMENTS)
        if taken:
            raise illegal("options", f"{taken[0]} is written elsewhere in this section or fixed")
        return self


_OWN_VLLM_ARGUMENTS = {
    "model", "dtype", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size",
    "gpu_memory_utilization", "max_model_len", "max_num_batched_tokens", "enforce_eager",
    "enable_prefix_caching", "enable_chunked_prefill", "load_format", "logprobs_mode",
    "enable_lora", "max_lora_rank", "max_loras", "worker_extension_cls", "seed",
    "async_scheduling", "generation_config", "enable_sleep_mode",
}  # fmt: skip


class SGLangEngineConfig(EngineConfig):
    """SGLang's engine, on CUDA."""

    implementation = "rlinf.engines.sglang:SGLangEngine"
    package = "sglang"
    extra = "sglang"
    tells_progress = False
    only_with: ClassVar = {"cuda_graph_max_bs": "disable_cuda_graph: false"}
    type: Literal["sglang"] = "sglang"
    """Which engine this section configures."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share each layer."""
    mem_fraction_static: float = Field(default=0.6, gt=0, le=1)
    """Fraction of device memory for weights and caches."""
    attention_backend: str | None = None
    """Name of the attention kernels; null: chosen by SGLang."""
    disable_cuda_graph: bool = False
    """Run without captured graphs."""
    cuda_graph_max_bs: int = Field(default=128, ge=1)
    """Largest batch for which a graph is captured."""
    enable_memory_saver: bool = True
    """Let weights and caches be released between rollouts."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of SGLang's `ServerArgs`, by their names there."""

    @property
    def devices_per_engine(self) -> int:
        """Devices that one engine computes on."""
        return self.tensor_parallel_size

    def unscored(self, sampling: SamplingConfig) -> Refusal | None:
        """SGLang's log-probs come after penalty and ban."""
        for key, default in _changed(sampling, ("repetition_penalty", "min_new_tokens")):
            return Refusal(key, "changes the log-probs that SGLang reports", f"nearest: {default}")
        return None

    def unserved(self, sampling: SamplingConfig) -> Refusal | None:
        """SGLang's penalty is for tokens of the answer alone."""
        for key, default in _changed(sampling, ("repetition_penalty",)):
            why = "is not for the tokens of the prompt with SGLang, as it is with other engines"
            return Refusal(key, why, f"nearest: {default}")
        return None


def _changed(sampling: SamplingConfig, keys: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Those of the keys whose values are not their defaults, each with its default."""
    fields = SamplingConfig.model_fields
    pairs = [(key, fields[key].default) for key in keys]
    return [(key, default) for key, default in pairs if getattr(sampling, key) != default]


REGISTRY = Registry(
    "engine",
    "rlinf.engines",
    {
        "hf": "rlinf.engines.config:HFEngineConfig",
        "vllm": "rlinf.engines.config:VLLMEngineConfig",
        "sglang": "rlinf.engines.config:SGLangEngineConfig",
    },
    EngineConfig,
)
"""A package adds an engine by an entry point in the group ``rlinf.engines`` that names its config
class, a subclass of :class:`EngineConfig`."""


def local_directory(path: Path | str) -> Path:
    """The directory of a model, made absolute so that no package takes it for a hub name."""
    return Path(path).expanduser().resolve()
