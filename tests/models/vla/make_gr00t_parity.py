"""Make the fixture in ``parity/gr00t`` from the original code, with random weights.

That is the action head of GR00T N1.5 as lerobot 0.4.4 has it. It needs an environment of its own:

    python3.11 -m venv v
    v/bin/pip install torch diffusers transformers==4.51.3 safetensors draccus==0.10.0
    v/bin/pip install --no-deps lerobot==0.4.4
    v/bin/python tests/models/vla/make_gr00t_parity.py tests/models/vla/parity/gr00t

The fixture has the head's weights under their published names, in half precision, and of two
embodiments the loss at some times and the actions that it samples in 4 steps.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

ROWS, READ, PLACES, HORIZON, ACTIONS, STATES, STEPS = 3, 16, 7, 4, 5, 6, 4
HEAD = {
    "hidden_size": 12, "input_embedding_dim": 16, "backbone_embedding_dim": READ,
    "max_seq_len": 8, "action_dim": ACTIONS, "action_horizon": HORIZON, "max_state_dim": STATES,
    "num_inference_timesteps": STEPS, "max_num_embodiments": 3, "num_target_vision_tokens": 3,
    "add_pos_embed": True, "use_vlln": True,
    "diffusion_model_cfg": {
        "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 4, "output_dim": 12,
        "cross_attention_dim": READ, "norm_type": "ada_norm", "interleave_self_attention": True,
        "positional_embeddings": None, "dropout": 0.2, "final_dropout": True,
    },
    "vl_self_attention_cfg": {
        "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
        "positional_embeddings": None, "dropout": 0.2, "final_dropout": True,
    },
}  # fmt: skip


def original() -> Any:
    """The module of the head, without the rest of lerobot, which wants much that is not needed."""
    root = Path(str(importlib.metadata.distribution("lerobot").locate_file("lerobot")))
    for name in ("lerobot", "lerobot.policies", "lerobot.policies.groot"):
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    return importlib.import_module("lerobot.policies.groot.action_head.flow_matching_action_head")


def main(out: Path) -> None:
    module = original()
    torch.manual_seed(0)
    head = module.FlowmatchingActionHead(module.FlowmatchingActionHeadConfig(**HEAD)).eval()
    for parameter in head.parameters():
        spread = 0.3 if parameter.ndim > 1 else 0.1
        changed = parameter.data + spread * torch.randn_like(parameter)
        parameter.data = changed.half().float()
    inputs = {
        "read": torch.randn(ROWS, PLACES, READ),
        "state": torch.randn(ROWS, STATES),
        "actions": torch.randn(ROWS, HORIZON, ACTIONS),
        "noise": torch.randn(ROWS, HORIZON, ACTIONS),
        "time": torch.tensor([0.0, 0.3137, 0.9]),
    }
    found = {}
    feature = module.BatchFeature
    for embodiment in (0, 2):

        def read() -> Any:
            return feature({"backbone_features": inputs["read"],
                            "backbone_attention_mask": torch.ones(ROWS, PLACES)})  # fmt: skip

        given = feature({
            "state": inputs["state"][:, None], "action": inputs["actions"],
            "embodiment_id": torch.full((ROWS,), embodiment),
            "action_mask": torch.ones(ROWS, HORIZON, ACTIONS),
        })  # fmt: skip
        head.sample_time = lambda *_, **__: inputs["time"]
        with mock.patch.object(torch, "randn", return_value=inputs["noise"]):
            with torch.no_grad():
                found[f"loss_{embodiment}"] = head(read(), given)["loss"]
            found[f"sampled_{embodiment}"] = head.get_action(read(), given)["action_pred"]
    out.mkdir(parents=True, exist_ok=True)
    save_file(inputs | found, out / "io.safetensors")
    weights = {f"action_head.{name}": each.half().contiguous()
               for name, each in head.state_dict().items()}  # fmt: skip
    save_file(weights, out / "head.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
