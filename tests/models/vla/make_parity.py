"""Make the fixtures in ``parity/`` from the original code, lerobot 0.6.1, with random weights.

It needs an environment of its own, with Python 3.12:

    python3.12 -m venv v && v/bin/pip install torch transformers==5.5.4 safetensors draccus einops
    v/bin/pip install --no-deps lerobot==0.6.1 torchvision==0.28.0
    v/bin/python tests/models/vla/make_parity.py pi05 tests/models/vla/parity/pi05

With ``names`` it prints a checksum of the names and shapes of the full-size models.
A fixture has a checkpoint as that code writes it, and the actions that it samples in 4 Euler steps.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file, save_model
from torch import nn

CLASSES = {"pi0": ("PI0Config", "PI0Pytorch"), "pi05": ("PI05Config", "PI05Pytorch")}
VOCABULARY, IMAGE, HORIZON, ACTIONS, STATES, STEPS = 64, 56, 8, 7, 8, 4


# A CPU build of torch lacks two operators that torchvision describes when it is imported.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in () if torch.version.cuda else ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def tiny(module: Any) -> None:
    """Let the classes of a module be built small: its sizes are written into its code."""
    gemma, build = module.GemmaConfig, module.PaliGemmaForConditionalGenerationWithPiGemma
    sizes = {"gemma_2b": (64, 128), "gemma_300m": (32, 64)}

    def sized(variant: str) -> Any:
        width, mlp = sizes[variant]
        return gemma(width, 2, mlp, num_heads=8, num_kv_heads=1, head_dim=16)

    def built(config: Any) -> nn.Module:
        values = {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "projection_dim": 64,
        }  # fmt: skip
        for name, value in values.items():
            setattr(config.vision_config, name, value)
        config.projection_dim = 64
        return build(config=config)

    module.get_gemma_config = sized
    module.PaliGemmaForConditionalGenerationWithPiGemma = built


def with_small_vocabulary(model: Any) -> None:
    both = model.paligemma_with_expert
    embedding = both.paligemma.model.language_model.embed_tokens
    embedding.weight = nn.Parameter(embedding.weight.data[:VOCABULARY].clone())
    both.paligemma.lm_head.weight = embedding.weight
    expert_head = both.gemma_expert.lm_head
    expert_head.weight = nn.Parameter(expert_head.weight.data[:VOCABULARY].clone())


def tiny_smolvla() -> nn.Module:
    """SmolVLA, whose sizes are those of a published SmolVLM that it is given in small."""
    from transformers import SmolVLMConfig

    module = importlib.import_module("lerobot.policies.smolvla.smolvlm_with_expert")
    both = {"num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 64}
    config = SmolVLMConfig(
        vision_config=both | {"hidden_size": 32, "num_attention_heads": 2, "image_size": 64,
                              "patch_size": 8, "num_hidden_layers": 2},
        text_config=both | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
                            "vocab_size": VOCABULARY, "model_type": "llama", "rms_norm_eps": 1e-5,
                            "pad_token_id": 0},
        scale_factor=4, image_token_id=1, pad_token_id=0,
    )  # fmt: skip
    tokens = SimpleNamespace(fake_image_token_id=2, global_image_token_id=3)
    module.AutoConfig = SimpleNamespace(from_pretrained=lambda _: config)
    module.AutoProcessor = SimpleNamespace(
        from_pretrained=lambda _: SimpleNamespace(tokenizer=tokens)
    )
    return sized(
        "smolvla", ("SmolVLAConfig", "VLAFlowMatching"), num_steps=STEPS, num_vlm_layers=4,
        resize_imgs_with_padding=(64, 64),
    )  # fmt: skip


def tiny_pi0(kind: str) -> nn.Module:
    tiny(importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}"))
    model = sized(
        kind, CLASSES[kind], dtype="float32", num_inference_steps=STEPS,
        image_resolution=(IMAGE, IMAGE),
    )  # fmt: skip
    with_small_vocabulary(model)
    return model


def sized(kind: str, classes: tuple[str, str], **options: Any) -> nn.Module:
    policies = f"lerobot.policies.{kind}"
    module = importlib.import_module(f"{policies}.modeling_{kind}")
    settings = importlib.import_module(f"{policies}.configuration_{kind}")
    config = getattr(settings, classes[0])(
        chunk_size=HORIZON, n_action_steps=HORIZON, max_state_dim=STATES, max_action_dim=ACTIONS,
        device="cpu", **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = getattr(module, classes[1])(config).eval()
    return model


def main(kind: str, out: Path) -> None:
    model: Any = tiny_smolvla() if kind == "smolvla" else tiny_pi0(kind)
    side = 64 if kind == "smolvla" else IMAGE
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # no norm or bias remains zero
    inputs = {
        "image_0": torch.rand(2, 3, side, side) * 2 - 1,
        "image_1": torch.rand(2, 3, side, side) * 2 - 1,
        "image_mask_0": torch.tensor([True, True]),
        "image_mask_1": torch.tensor([True, False]),
        "tokens": torch.randint(0, VOCABULARY, (2, 6)),
        "token_mask": torch.tensor([[True] * 6, [True] * 4 + [False] * 2]),
        "noise": torch.randn(2, HORIZON, ACTIONS),
    }
    if kind != "pi05":
        inputs["state"] = torch.randn(2, STATES)
    images = [inputs["image_0"], inputs["image_1"]]
    masks = [inputs["image_mask_0"], inputs["image_mask_1"]]
    told = (inputs["state"],) if kind != "pi05" else ()
    actions = model.sample_actions(
        images, masks, inputs["tokens"], inputs["token_mask"], *told, noise=inputs["noise"]
    )
    out.mkdir(parents=True, exist_ok=True)
    save_file(inputs | {"actions": actions}, out / "io.safetensors")
    holder = nn.Module()
    holder.model = model
    save_model(holder, str(out / "model.safetensors"))


def names() -> None:
    """Print what the names and shapes of the full-size models come to."""
    for kind, (config_class, model_class) in CLASSES.items():
        module = importlib.import_module(f"lerobot.policies.{kind}.modeling_{kind}")
        settings = importlib.import_module(f"lerobot.policies.{kind}.configuration_{kind}")
        config = getattr(settings, config_class)(dtype="float32", device="cpu")
        with torch.device("meta"):
            state = getattr(module, model_class)(config).state_dict()
        lines = sorted(f"model.{name} {list(tensor.shape)}" for name, tensor in state.items())
        print(kind, len(lines), hashlib.sha256("\n".join(lines).encode()).hexdigest())


if __name__ == "__main__" and sys.argv[1] == "names":
    names()
elif __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
