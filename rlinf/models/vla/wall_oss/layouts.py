"""Names of the weights of WALL-OSS in published files, for :mod:`rlinf.models.vla.loading`."""

from __future__ import annotations

from rlinf.models.vla.loading import NameLayout
from rlinf.models.vla.pi0.layouts import EMBEDDING, HEAD

_TOWER = {
    "attn.qkv": "qkv", "attn.proj": "proj", "mlp.gate_proj": "gate_proj",
    "mlp.up_proj": "up_proj", "mlp.down_proj": "down_proj", "norm1": "norm1", "norm2": "norm2",
}  # fmt: skip
_HEAD = {
    "w1": "action_in", "w2": "time_in", "w3": "time_out", "action_proj_back": "action_out",
    "propri_proj": "state_proj",
}  # fmt: skip


def _rules(begin: str) -> tuple[tuple[str, str], ...]:
    visual, text = f"{begin}visual", f"{begin}model"
    head = f"{begin}action_preprocessor"
    return (
        (f"{visual}.patch_embed.proj", "vision.patch_embedding"),
        *(
            (f"{visual}.blocks.{{}}.{theirs}", f"vision.layers.{{}}.{ours}")
            for theirs, ours in _TOWER.items()
        ),
        (f"{visual}.merger.ln_q", "vision.norm"),
        (f"{visual}.merger.mlp.0", "vision.merge_in"),
        (f"{visual}.merger.mlp.2", "vision.merge_out"),
        (f"{text}.embed_tokens", "language.embed_tokens"),
        (f"{text}.layers.{{}}.moe.experts", "language.layers.{}.experts"),
        (f"{text}.layers", "language.layers"),
        (f"{text}.norm", "language.norm"),
        (f"{begin}lm_head", "language.lm_head"),
        *((f"{head}.{theirs}", ours) for theirs, ours in _HEAD.items()),
        # The units of the sets that it was trained on, by their names.
        (f"{head}.normalizer_action", "units.action"),
        (f"{head}.normalizer_propri", "units.state"),
    )


LAYOUTS = tuple(
    NameLayout(name, _rules(begin), tied=((EMBEDDING, HEAD),), unused=(HEAD, "units."))
    for name, begin in (("wall-x", ""), ("lerobot", "model."))
)
