"""Names of the weights of GR00T N1.5 in published files, for :mod:`rlinf.models.vla.loading`."""

from __future__ import annotations

from rlinf.models.vla.loading import NameLayout
from rlinf.models.vla.pi0.layouts import EMBEDDING, HEAD, decoder_rules, vision_rules

_OWN = ("state_encoder", "action_encoder", "action_decoder", "position_embedding",
        "future_tokens")  # fmt: skip
_POOLING = ("probe", "attention.in_proj_weight", "attention.in_proj_bias",
            "attention.out_proj.weight", "attention.out_proj.bias", "layernorm.weight",
            "layernorm.bias", "mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight",
            "mlp.fc2.bias")  # fmt: skip


def _block_rules(theirs: str, ours: str) -> tuple[tuple[str, str], ...]:
    """Of layers as diffusers names their parts."""
    block, layer = f"{theirs}.transformer_blocks.{{}}", f"{ours}.layers.{{}}"
    return (
        (f"{block}.attn1.to_out.0", f"{layer}.attention.to_out"),
        (f"{block}.attn1", f"{layer}.attention"),
        (f"{block}.ff.net.0.proj", f"{layer}.ff_in"),
        (f"{block}.ff.net.2", f"{layer}.ff_out"),
        (f"{block}.norm1.linear", f"{layer}.time_proj"),
        (block, layer),
    )


def _rules(begin: str, vision: str) -> tuple[tuple[str, str], ...]:
    eagle, head = f"{begin}backbone.eagle_model", f"{begin}action_head"
    return (
        *vision_rules(f"{eagle}.{vision}"),
        (f"{eagle}.{vision}.head", "vision.head"),
        (f"{eagle}.mlp1.0", "vision.projector"),
        (f"{eagle}.language_model.model.embed_tokens", "language.embed_tokens"),
        *decoder_rules(f"{eagle}.language_model.model", "language"),
        (f"{eagle}.language_model.lm_head", "language.lm_head"),
        (f"{head}.vlln", "look_norm"),
        *_block_rules(f"{head}.vl_self_attention", "look"),
        (f"{head}.model.timestep_encoder.timestep_embedder.linear_1", "expert.time_in"),
        (f"{head}.model.timestep_encoder.timestep_embedder.linear_2", "expert.time_out"),
        *_block_rules(f"{head}.model", "expert"),
        (f"{head}.model.proj_out_1", "expert.proj_out_1"),
        (f"{head}.model.proj_out_2", "expert.proj_out_2"),
        *((f"{head}.{name}", name) for name in _OWN),
    )


LAYOUTS = tuple(
    NameLayout(
        name,
        _rules(begin, vision),
        tied=((EMBEDDING, HEAD),),
        # Eagle's layers are cut off below its output head, which may be stored, and be another.
        unused=(HEAD, *(f"vision.head.{part}" for part in _POOLING)),
    )
    for name, begin, vision in (
        ("isaac-gr00t", "", "vision_model.vision_model"),
        # The classes of transformers 5 have one level less.
        ("isaac-gr00t, transformers 5", "", "vision_model"),
        ("lerobot", "_groot_model.", "vision_model.vision_model"),
    )
)
