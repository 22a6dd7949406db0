"""Make the fixture in ``parity/wall_oss`` from the original code, with random weights.

That is WALL-OSS as lerobot 0.6.1 has it. It needs an environment of its own, with Python 3.12:

    python3.12 -m venv v && v/bin/pip install torch transformers==5.5.4 safetensors draccus einops
    v/bin/pip install --no-deps lerobot==0.6.1 torchvision==0.28.0 torchdiffeq qwen_vl_utils peft
    v/bin/python tests/models/vla/make_wall_parity.py tests/models/vla/parity/wall_oss

The fixture has the weights in half precision, two rows of which each has two pictures of different
shape and its own length of text, the loss at some times, and the actions of 4 Euler steps.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

HORIZON, ACTIONS, STATES, STEPS, PATCH = 3, 4, 5, 4, 4
PICTURE, START, STATE, ACTION, VOCABULARY = 20, 21, 22, 23, 24
GRIDS = torch.tensor([[1, 4, 8], [1, 6, 4]])
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
    "image_token_id": PICTURE, "vision_start_token_id": START, "video_token_id": 19,
    "tie_word_embeddings": False, "num_experts": 2, "dim_inputs": [16, 16], "mlp_moe": True,
    "experts": [
        {"hidden_size": 16, "intermediate_size": inner, "hidden_act": "silu"} for inner in (20, 12)
    ],
    "dof_config": {"arm": ACTIONS}, "agent_pos_config": {"arm": STATES}, "pad_token_id": 0,
    "vision_config": {
        "depth": 3, "hidden_size": 16, "intermediate_size": 12, "num_heads": 2, "patch_size": PATCH,
        "window_size": 16, "fullatt_block_indexes": [1], "out_hidden_size": 16,
    },
}  # fmt: skip


# A CPU build of torch lacks two operators that torchvision describes when it is imported.
_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
for _name in () if torch.version.cuda else ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def original() -> tuple[Any, Any]:
    """Modules of the model and of its configuration."""
    root = Path(str(importlib.metadata.distribution("lerobot").locate_file("lerobot")))
    for name in ("lerobot.policies", "lerobot.policies.wall_x"):
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    module = importlib.import_module("lerobot.policies.wall_x.modeling_wall_x")
    return module, importlib.import_module("lerobot.policies.wall_x.qwen_model")


class _InFloat32:
    """torch, of which bfloat16 is float32: the code rounds the state's token to it."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def patches(picture: torch.Tensor) -> torch.Tensor:
    """A normalised picture [3, H, W] as the processor of Qwen lays it out: merged patches first,
    each twice in time."""
    rows, columns = (edge // PATCH // 2 for edge in picture.shape[1:])
    cut = picture.reshape(3, rows, 2, PATCH, columns, 2, PATCH)
    cut = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5).expand(-1, -1, -1, -1, -1, 2, -1, -1)
    return cut.reshape(rows * columns * 4, -1)


def rows_of_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts with their actions, padded on the left, and what is there."""
    counts = (GRIDS.prod(1) // 4).tolist()
    shown = [item for count in counts for item in (START, *[PICTURE] * count, 18)]
    found = [[1, 2, *shown, *text, STATE, 3, *[ACTION] * HORIZON] for text in ([5, 6, 7, 8], [9])]
    longest = max(map(len, found))
    gaps = [longest - len(row) for row in found]
    tokens = [[0] * gap + row for gap, row in zip(gaps, found, strict=True)]
    there = [[0] * gap + [1] * len(row) for gap, row in zip(gaps, found, strict=True)]
    return torch.tensor(tokens), torch.tensor(there)


def main(out: Path) -> None:
    module, sizes = original()
    torch.manual_seed(0)
    numbers = {"<|action|>": ACTION, "<|propri|>": STATE}
    tokenizer = SimpleNamespace(convert_tokens_to_ids=numbers.__getitem__)
    config = sizes.Qwen2_5_VLConfig(**SIZES)
    model = module.Qwen2_5_VLMoEForAction(
        config, processor=SimpleNamespace(tokenizer=tokenizer), vision_attn_implementation="sdpa"
    ).eval()
    for parameter in model.parameters():
        spread = 0.15 if parameter.ndim > 1 else 0.1
        changed = parameter.data + spread * torch.randn_like(parameter)
        parameter.data = changed.half().float()
    tokens, there = rows_of_tokens()
    pictures = [torch.randn(2, 3, PATCH * h, PATCH * w) for _, h, w in GRIDS.tolist()]
    pixels = torch.cat([patches(each[row]) for row in range(2) for each in pictures])
    inputs = {
        "state": torch.randn(2, STATES), "actions": torch.randn(2, HORIZON, ACTIONS),
        "noise": torch.randn(2, HORIZON, ACTIONS), "time": torch.tensor([0.1, 0.7]),
        "known": torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0]), "moved": torch.tensor([1.0, 1, 1, 0]),
    }  # fmt: skip
    given = {
        "input_ids": tokens, "attention_mask": there, "pixel_values": pixels,
        "image_grid_thw": GRIDS.repeat(2, 1), "moe_token_types": (tokens == ACTION).long(),
        "proprioception": inputs["state"][:, None],
        "agent_pos_mask": inputs["known"].expand(2, 1, -1),
        "dof_mask": inputs["moved"].expand(2, HORIZON, -1),
    }  # fmt: skip
    model.action_preprocessor.sample_time = lambda *_: inputs["time"]
    with mock.patch.object(module, "torch", _InFloat32()), torch.no_grad():
        with mock.patch.object(torch, "randn_like", return_value=inputs["noise"]):
            loss = model.train_step_forward(action_chunk=inputs["actions"], **given).flow_loss
        with mock.patch.object(torch, "randn", return_value=inputs["noise"]):
            sampled = model.predict(
                "diffusion", pred_horizon=HORIZON, action_dim=ACTIONS,
                num_inference_timesteps=STEPS, **given,
            )["predict_action"]  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    shown = {f"picture_{number}": each for number, each in enumerate(pictures)}
    save_file(
        inputs | shown | {"tokens": tokens, "there": there, "loss": loss, "sampled": sampled},
        out / "io.safetensors",
    )
    weights = {name: each.half().contiguous() for name, each in model.state_dict().items()}
    save_file(weights, out / "model.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
