"""Make the fixture in ``parity/openvla/`` from the original code, with random weights.

It needs copies of two repositories, openvla/openvla at c8f03f4 and moojink/openvla-oft at 213c5ff,
and an environment of its own:

    python3.11 -m venv v
    v/bin/pip install torch torchvision transformers==4.57.6 timm==0.9.16 safetensors
    v/bin/python tests/models/vla/make_openvla_parity.py OPENVLA OPENVLA_OFT FOLDER

The fixture has a published directory of each kind in one, and what the original code computes with
it. The transformers fork in which attention of OpenVLA-OFT is bidirectional is replaced by a mask
without a causal part, which is all that it changes.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCABULARY, UNUSED, IMAGE, STATES, CHUNK, ACTIONS = 320, 64, 28, 5, 2, 7
WIDTH, VISION = 16, {"embed_dim": 16, "depth": 3, "num_heads": 2}
TEXT = {
    "model_type": "llama", "vocab_size": VOCABULARY + UNUSED, "hidden_size": WIDTH,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip

# A CPU build of torch lacks two operators that torchvision describes when it is imported.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in () if torch.version.cuda else ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def original(repository: str, *names: str) -> list[Any]:
    """Modules of a copy of a repository, without what their packages import otherwise."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "prismatic"]:
        del sys.modules[name]
    for package in ("", ".extern", ".extern.hf", ".models", ".training", ".vla"):
        module = types.ModuleType(f"prismatic{package}")
        module.__path__ = [f"{repository}/prismatic{package.replace('.', '/')}"]
        sys.modules[module.__name__] = module
    found = []
    for name in names:
        module = importlib.import_module(f"prismatic.{name}")
        if name == "vla.constants":
            module.NUM_ACTIONS_CHUNK, module.ACTION_DIM = CHUNK, ACTIONS
            module.ACTION_TOKEN_BEGIN_IDX = VOCABULARY - 257
        if name.endswith("modeling_prismatic"):  # written for transformers 4.40
            module.PrismaticPreTrainedModel._supports_sdpa = True
        found.append(module)
    return found


def small_towers() -> None:
    """Let timm make small towers of the published names."""
    import timm

    make = timm.create_model

    def small(name: str, **arguments: Any) -> Any:
        return make(name, **VISION, **arguments)

    timm.create_model = small


def bidirectional() -> None:
    """Let every position of a Llama see every other one that is no padding."""
    from transformers.models.llama import modeling_llama

    def mask(*, input_embeds: Any, attention_mask: Any, **_: Any) -> Any:
        return attention_mask.bool()[:, None, None].expand(-1, 1, input_embeds.shape[1], -1)

    modeling_llama.create_causal_mask = mask


def randomize(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


def main(openvla: str, oft: str, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    small_towers()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 60, (2, 6), generator=generator)
    prompt[:, 0] = 1
    pixels = torch.randn(2, 2, 6, IMAGE, IMAGE, generator=generator)
    states = torch.randn(2, STATES, generator=generator)
    tokens = torch.randint(VOCABULARY - 256, VOCABULARY, (2, ACTIONS), generator=generator)
    seen = {"prompt": prompt, "pixels": pixels, "states": states, "tokens": tokens}

    (modeling,) = original(openvla, "extern.hf.modeling_prismatic")
    published = modeling.OpenVLAConfig(
        vision_backbone_id="dinosiglip-vit-so-224px", llm_backbone_id="llama2-7b-pure",
        text_config=TEXT,
        norm_stats={"one": {"action": {"q01": [-0.5] * 6 + [0.0], "q99": [0.25] * 6 + [1.0],
                                       "mask": [True] * 6 + [False]}}},
    )  # fmt: skip
    published.image_sizes = [IMAGE, IMAGE]
    model = modeling.OpenVLAForActionPrediction(published).eval()
    randomize(model, 1)
    ids = torch.cat([prompt, tokens], dim=1)
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels[:, 0])
    causal = found.logits[:, -ACTIONS - 1 : -1, VOCABULARY - 256 : VOCABULARY]
    weights = model.state_dict()
    save_file({k: v.contiguous() for k, v in weights.items()}, target / "model.safetensors")
    config = json.loads(published.to_json_string(use_diff=False))
    config = {
        name: config[name]
        for name in ("model_type", "timm_model_ids", "image_sizes", "n_action_bins",
                     "pad_to_multiple_of", "image_resize_strategy", "norm_stats")
    }  # fmt: skip
    size = {"width": 16, "depth": 3, "heads": 2}
    config |= {
        "image_resize_strategy": "resize-naive",
        "text_config": {**TEXT, "rms_norm_eps": published.text_config.rms_norm_eps},
        "vision_sizes": [{**size, "mlp": 64}, {**size, "mlp": int(16 * 3.7362)}],
    }
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    bidirectional()
    _, modeling, heads, projectors, film = original(
        oft, "vla.constants", "extern.hf.modeling_prismatic", "models.action_heads",
        "models.projectors", "models.film_vit_wrapper",
    )  # fmt: skip
    model = modeling.OpenVLAForActionPrediction(published).eval()
    model.load_state_dict(weights)
    model.vision_backbone.set_num_images_in_input(2)
    head = heads.L1RegressionActionHead(WIDTH, WIDTH, ACTIONS)
    projector = projectors.ProprioProjector(WIDTH, STATES)
    for seed, part in enumerate((head, projector), start=2):
        randomize(part, seed)
    count = CHUNK * ACTIONS
    ids = torch.cat([prompt, torch.ones(2, count).long(), torch.full((2, 1), 2)], dim=1)
    labels = torch.full_like(ids, -100)
    labels[:, -count - 1 : -1] = VOCABULARY - 1
    labels[:, -1] = 2
    given = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels,
        "pixel_values": pixels.flatten(1, 2), "output_hidden_states": True,
    }  # fmt: skip
    with torch.no_grad():
        discrete = model(**given).logits[:, -count - 2 : -2, VOCABULARY - 256 : VOCABULARY]
        model.vision_backbone = film.FiLMedPrismaticVisionBackbone(model.vision_backbone, WIDTH)
        for seed, tower in enumerate(("featurizer", "fused_featurizer"), start=4):
            for block in getattr(model.vision_backbone.vision_backbone, tower).blocks:
                randomize(block.scale, seed)
                randomize(block.shift, seed + 10)
        found = model(**given, proprio=states, proprio_projector=projector, use_film=True)
        regressed = head.predict_action(found.hidden_states[-1][:, -count - 2 : -2])
    torch.save(head.state_dict(), target / "action_head--1_checkpoint.pt")
    torch.save(projector.state_dict(), target / "proprio_projector--1_checkpoint.pt")
    torch.save(model.vision_backbone.state_dict(), target / "vision_backbone--1_checkpoint.pt")
    save_file(
        {**seen, "causal": causal.contiguous(), "discrete": discrete.contiguous(),
         "regressed": regressed.contiguous()},
        target / "io.safetensors",
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
