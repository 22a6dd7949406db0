"""Names of the weights of π₀ and π₀.₅ in published files, for :mod:`rlinf.models.vla.loading`."""

from __future__ import annotations

from rlinf.models.vla.loading import NameLayout
from rlinf.models.vla.statistics_files import BUFFERS, NORMALISERS

EMBEDDING, HEAD = "language.embed_tokens.weight", "language.lm_head.weight"
EXPERT_HEAD = "expert.lm_head.weight"
OF_PI05 = "time_mlp_in.weight"
"""What π₀.₅ has and π₀ has not."""
PI0_ALONE = ("lerobot-0.3", "transformers", "dexbotic")
"""Layouts of programs that have π₀ and no π₀.₅."""
OF_OPENPI = ("openpi", "transformers-4.51")
"""Layouts of openpi, and of what RLinf trains with it, whose transforms filter pictures."""

_OWN_PARTS = tuple(
    (name, name)
    for name in (
        "action_in_proj", "action_out_proj", "state_proj", "action_time_mlp_in",
        "action_time_mlp_out", "time_mlp_in", "time_mlp_out",
    )
)  # fmt: skip


def vision_rules(theirs: str) -> tuple[tuple[str, str], ...]:
    """Of SigLIP."""
    return (
        (f"{theirs}.encoder.layers.{{}}.mlp.fc1", "vision.layers.{}.fc1"),
        (f"{theirs}.encoder.layers.{{}}.mlp.fc2", "vision.layers.{}.fc2"),
        (f"{theirs}.encoder.layers", "vision.layers"),
        (f"{theirs}.embeddings.patch_embedding", "vision.patch_embedding"),
        (f"{theirs}.embeddings.position_embedding", "vision.position_embedding"),
        (f"{theirs}.post_layernorm", "vision.post_layernorm"),
    )


def decoder_rules(theirs: str, ours: str) -> tuple[tuple[str, str], ...]:
    """Of Gemma and of Llama, which name their parts alike."""
    return (
        (f"{theirs}.layers.{{}}.mlp.gate_proj", f"{ours}.layers.{{}}.gate_proj"),
        (f"{theirs}.layers.{{}}.mlp.up_proj", f"{ours}.layers.{{}}.up_proj"),
        (f"{theirs}.layers.{{}}.mlp.down_proj", f"{ours}.layers.{{}}.down_proj"),
        (f"{theirs}.layers", f"{ours}.layers"),
        (f"{theirs}.norm", f"{ours}.norm"),
    )


def _openpi(begin: str, *, vision: str, projector: str, language: str, head: str) -> tuple[
    tuple[str, str], ...
]:  # fmt: skip
    """The classes of openpi and lerobot, whose inner names are those of their transformers."""
    both = f"{begin}paligemma_with_expert"
    return (
        *vision_rules(f"{both}.paligemma.{vision}"),
        (f"{both}.paligemma.{projector}.linear", "vision.projector"),
        (f"{both}.paligemma.{language}.embed_tokens", "language.embed_tokens"),
        *decoder_rules(f"{both}.paligemma.{language}", "language"),
        (f"{both}.paligemma.{head}", "language.lm_head"),
        *decoder_rules(f"{both}.gemma_expert.model", "expert"),
        (f"{both}.gemma_expert.lm_head", "expert.lm_head"),
        *((begin + theirs, ours) for theirs, ours in _OWN_PARTS),
    )


_NEW = {
    "projector": "model.multi_modal_projector",
    "language": "model.language_model",
    "head": "lm_head",
}
_OLD = {
    "vision": "vision_tower.vision_model",
    "projector": "multi_modal_projector",
    "language": "language_model.model",
    "head": "language_model.lm_head",
}
_LEVEL, _FLAT = "model.vision_tower.vision_model", "model.vision_tower"

_RULES = {
    "openpi": _openpi("", vision=_LEVEL, **_NEW),
    "lerobot-0.4": _openpi("model.", vision=_LEVEL, **_NEW),
    "lerobot-0.6": _openpi("model.", vision=_FLAT, **_NEW),
    "transformers-4.51": _openpi("", **_OLD),
    "lerobot-0.3": (*NORMALISERS, *_openpi("model.", **_OLD)),
    # The classes of transformers 5 itself, as state_dict names them.
    "transformers": (
        *vision_rules("model.vlm.vision_tower"),
        ("model.vlm.multi_modal_projector.linear", "vision.projector"),
        ("model.vlm.language_model.embed_tokens", "language.embed_tokens"),
        *decoder_rules("model.vlm.language_model", "language"),
        ("model.dit.embed_tokens", "expert.lm_head"),
        *decoder_rules("model.dit", "expert"),
        ("action_out_proj", "action_out_proj"),
        *((f"embed_action_time.{theirs}", ours) for theirs, ours in _OWN_PARTS[:1]),
        *((f"embed_action_time.{theirs}", ours) for theirs, ours in _OWN_PARTS[2:]),
    ),
    # Dexbotic's π₀ (github.com/Dexmal/dexbotic, dexbotic/model/pi0): the same graph, whose expert
    # has embeddings that nothing reads.
    "dexbotic": (
        *vision_rules("model.mm_vision_tower.vision_tower.vision_model"),
        ("model.mm_projector", "vision.projector"),
        ("model.llm.embed_tokens", "language.embed_tokens"),
        *decoder_rules("model.llm", "language"),
        ("lm_head", "language.lm_head"),
        ("model.action_expert.embed_tokens", "expert.lm_head"),
        *decoder_rules("model.action_expert", "expert"),
        *((f"model.{theirs}", ours) for theirs, ours in _OWN_PARTS),
    ),
    # policy.safetensors of a run; what it has beside the network is in no published file.
    "rlinf": tuple(
        (f"network.{part}", part)
        for part in ("vision", "language", "expert", *(ours for _, ours in _OWN_PARTS))
    ),
}

_UNUSED = {"rlinf": (), "lerobot-0.3": (EXPERT_HEAD, *BUFFERS)}
LAYOUTS = tuple(
    NameLayout(
        name,
        rules,
        tied=() if name == "rlinf" else ((EMBEDDING, HEAD),),
        unused=_UNUSED.get(name, (EXPERT_HEAD,)),
    )
    for name, rules in _RULES.items()
)
