"""Whether prompts and answers fit into the context of a model, before anything starts."""

from __future__ import annotations

from rlinf.data.prompts.dataset import PromptDataset
from rlinf.engines.config import EngineConfig, SamplingConfig, local_directory
from rlinf.engines.weights import sizes_of
from rlinf.errors import ConfigError
from rlinf.models.language_config import LanguageModelConfig


def check_context(
    prompts: PromptDataset,
    sampling: SamplingConfig,
    *,
    model: LanguageModelConfig,
    engine: EngineConfig,
    key: str,
) -> None:
    """Refuse what an engine would refuse once the longest prompt is drawn.

    Args:
        prompts: All that may be drawn.
        sampling: How many tokens an answer may have.
        model: Its files say how long prompt and answer may be together.
        engine: May bound that further.
        key: Of the section of ``sampling``, for the message.

    Raises:
        ConfigError: The longest prompt leaves too little, or the model's configuration cannot be
            read.
    """
    if model.path is None:
        raise ValueError("a model without files has no context yet")
    try:
        own = sizes_of(local_directory(model.path))[1]
    except (OSError, ValueError, KeyError) as error:
        reason = f"the configuration of the model cannot be read: {error}"
        raise ConfigError(reason, key="model.path") from error
    known = [limit for limit in (own, engine.context) if limit is not None]
    longest, new = prompts.longest, sampling.max_new_tokens
    if not known or longest + new <= min(known):
        return
    left, room = min(known) - longest, min(known) - new
    nearest = [f"max_new_tokens: {left}"] if left > 0 else []
    nearest += [f"data.max_prompt_length: {room}"] if room > 0 else []
    raise ConfigError(
        f"{new} new tokens after the longest prompt, which has {longest}, exceed the context of "
        f"{min(known)}; nearest: {' or '.join(nearest) or 'a model with a longer context'}",
        key=f"{key}.max_new_tokens",
    )
