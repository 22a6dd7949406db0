"""Make the fixtures in ``parity/`` by the original code, lerobot 0.6.1, with random weights.

It needs an environment of its own, with Python 3.12:

    python3.12 -m venv v && v/bin/pip install 'lerobot[diffusion]==0.6.1'
    v/bin/python -m tests.models.visuomotor.make_parity act

With ``names`` it prints a checksum of the names and shapes of the published sizes.
A fixture is a directory as lerobot publishes it, with weights in half precision, and ``io``: what
the policy was given, the actions that came out of its pipelines, and its losses.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

HERE = Path(__file__).parent / "parity"
ROWS, HEIGHT, WIDTH, HORIZON, ACTIONS, STATES, STEPS = 2, 32, 48, 8, 3, 5, 4
CAMERAS = ("observation.images.front", "observation.images.wrist")


class Small(ResNet):
    """ResNet18 with one block in each stage and few channels."""

    def __init__(self, channels: tuple[int, ...], norm: Any) -> None:
        nn.Module.__init__(self)
        self._norm_layer, self.inplanes, self.dilation = norm, channels[0], 1
        self.groups, self.base_width = 1, 64
        self.conv1 = nn.Conv2d(3, channels[0], 7, 2, 3, bias=False)
        self.bn1 = norm(channels[0])
        self.relu, self.maxpool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        for number, count in enumerate(channels):
            layer = self._make_layer(BasicBlock, count, 1, stride=2 if number else 1)
            setattr(self, f"layer{number + 1}", layer)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(channels[-1], 2)


def small(*channels: int) -> Any:
    return lambda norm_layer=nn.BatchNorm2d, **_: Small(channels, norm_layer)


def features() -> dict[str, Any]:
    types = importlib.import_module("lerobot.configs.types")
    feature, kinds = types.PolicyFeature, types.FeatureType
    seen = {name: feature(type=kinds.VISUAL, shape=(3, HEIGHT, WIDTH)) for name in CAMERAS}
    return {
        "input_features": seen | {"observation.state": feature(type=kinds.STATE, shape=(STATES,))},
        "output_features": {"action": feature(type=kinds.ACTION, shape=(ACTIONS,))},
        "device": "cpu",
        "pretrained_backbone_weights": None,
    }


def statistics() -> dict[str, dict[str, Tensor]]:
    def of(shape: tuple[int, ...], middle: float) -> dict[str, Tensor]:
        mean, std = middle + 0.1 * torch.randn(shape), 0.2 + 0.2 * torch.rand(shape)
        return {"mean": mean, "std": std, "min": mean - 2 * std, "max": mean + 2 * std}

    found = {name: of((3, 1, 1), 0.45) for name in CAMERAS}
    found |= {"observation.state": of((STATES,), 0.2), "action": of((ACTIONS,), 0.1)}
    found["observation.state"]["min"][-1] = found["observation.state"]["max"][-1]  # never moved
    return found


def given() -> dict[str, Tensor]:
    """Observations and actions as an environment has them."""
    states = torch.randn(ROWS, STATES)
    pictures = {
        name.rpartition(".")[2]: torch.randint(0, 256, (ROWS, HEIGHT, WIDTH, 3), dtype=torch.uint8)
        for name in CAMERAS
    }
    return {"states": states, "actions": torch.rand(ROWS, HORIZON, ACTIONS) - 0.4, **pictures}


def as_lerobot(io: dict[str, Tensor], known: dict[str, Any]) -> dict[str, Tensor]:
    states = io["states"].clone()
    states[:, -1] = known["observation.state"]["min"][-1]
    io["states"] = states
    found = {"observation.state": states, "action": io["actions"]}
    for name in CAMERAS:
        pictures = io[name.rpartition(".")[2]]
        found[name] = pictures.permute(0, 3, 1, 2).float() / 255
    return found


def begin(kind: str, names: tuple[str, str], **options: Any) -> tuple[Any, Any, Any, Any]:
    """Policy with random weights that are exact in half precision, its pipelines, statistics."""
    place = f"lerobot.policies.{kind}"
    config_class = getattr(importlib.import_module(f"{place}.configuration_{kind}"), names[0])
    policy_class = getattr(importlib.import_module(f"{place}.modeling_{kind}"), names[1])
    torch.manual_seed(0)
    policy = policy_class(config_class(**features(), **options))
    for name, tensor in policy.state_dict().items():
        if "norm" in name or "bn" in name or "running" in name:
            tensor.add_(0.2 * torch.rand(tensor.shape))  # none remains 0 or 1
        elif name.rpartition(".")[2] == "bias":
            tensor.add_(0.1 * torch.randn(tensor.shape))
        if tensor.is_floating_point() and "pos_" not in name:
            tensor.copy_(tensor.half().float())
    known = statistics()
    make = getattr(importlib.import_module(f"{place}.processor_{kind}"),
                   f"make_{kind}_pre_post_processors")  # fmt: skip
    return policy, *make(policy.config, known), known


def save(kind: str, policy: Any, pipelines: tuple[Any, Any], io: dict[str, Tensor]) -> None:
    out = HERE / kind
    policy.save_pretrained(out)
    names = ("policy_preprocessor.json", "policy_postprocessor.json")
    for pipeline, name in zip(pipelines, names, strict=True):
        pipeline.save_pretrained(out, config_filename=name)
    weights = load_file(out / "model.safetensors")
    halves = {name: t.half() if t.dtype == torch.float32 and "pos_" not in name else t
              for name, t in weights.items()}  # fmt: skip
    save_file(halves, out / "model.safetensors")
    save_file({name: each.contiguous() for name, each in io.items()}, out / "io.safetensors")


def act() -> None:
    torchvision.models.resnet18 = small(8, 8, 16, 16)
    policy, before, after, known = begin(
        "act", ("ACTConfig", "ACTPolicy"), chunk_size=HORIZON, n_action_steps=HORIZON,
        dim_model=16, n_heads=2, dim_feedforward=24, n_encoder_layers=2, n_decoder_layers=2,
        n_vae_encoder_layers=1, latent_dim=4, dropout=0.0,
    )  # fmt: skip
    io = given()
    batch = before(as_lerobot(io, known))
    io["acted"] = after(policy.predict_action_chunk(dict(batch)))
    io["latent"] = torch.randn(ROWS, 4)
    padded = torch.zeros(ROWS, HORIZON, dtype=torch.bool)
    padded[1, -2:] = True
    policy.train()
    torch.randn_like, real = lambda _: io["latent"], torch.randn_like
    _, losses = policy.forward(dict(batch) | {"action_is_pad": padded})
    torch.randn_like = real
    io |= {name: torch.tensor(losses[name]) for name in ("l1_loss", "kld_loss")}
    io["recorded"] = ~padded
    save("act", policy, (before, after), io)


def diffusion() -> None:
    """Two successive observations, the same and others; a window is cut out of pictures."""
    torchvision.models.resnet18 = small(16)
    policy, before, after, known = begin(
        "diffusion", ("DiffusionConfig", "DiffusionPolicy"), n_obs_steps=2, horizon=HORIZON,
        n_action_steps=6, crop_shape=(28, 40), use_group_norm=True, down_dims=(8, 8),
        kernel_size=3, n_groups=2, diffusion_step_embed_dim=8, spatial_softmax_num_keypoints=3,
        num_train_timesteps=20, num_inference_steps=STEPS,
    )  # fmt: skip
    policy.eval()
    io = given()
    batch = before(as_lerobot(io, known))
    io |= {"start": torch.randn(ROWS, HORIZON, ACTIONS),
           "steps": torch.randn(ROWS, STEPS, HORIZON, ACTIONS)}  # fmt: skip
    twice = {name: torch.stack([each, each], dim=1) for name, each in batch.items()
             if name.startswith("observation") and isinstance(each, Tensor)}  # fmt: skip
    scheduling = importlib.import_module("diffusers.schedulers.scheduling_ddpm")
    drawn = iter(io["steps"].unbind(1))
    scheduling.randn_tensor = lambda *_, **__: next(drawn)

    def acted(seen: dict[str, Tensor]) -> Tensor:
        found: Tensor = after(policy.predict_action_chunk(dict(seen), noise=io["start"]))
        return found

    io["acted"] = acted(twice)
    schedulers = importlib.import_module("diffusers.schedulers.scheduling_ddim")
    policy.diffusion.noise_scheduler = schedulers.DDIMScheduler(
        num_train_timesteps=20, beta_schedule="squaredcos_cap_v2"
    )
    io["acted_ddim"] = acted(twice)
    # All of a recorded chunk counts there, also what is before the present step.
    io |= {"noise": torch.randn(ROWS, HORIZON, ACTIONS), "time": torch.tensor([3, 17])}
    reals = torch.randn, torch.randint
    torch.randn, torch.randint = lambda *_, **__: io["noise"], lambda *_, **__: io["time"]
    io["loss"] = policy.diffusion.compute_loss({
        **twice, "observation.images": torch.stack([twice[name] for name in CAMERAS], dim=-4),
        "action": batch["action"], "action_is_pad": torch.zeros(ROWS, HORIZON, dtype=torch.bool),
    }).detach()  # fmt: skip
    torch.randn, torch.randint = reals
    ago = given()
    earlier = before(as_lerobot(ago, known))
    io |= {f"{name}@1": ago[name] for name in ("states", "front", "wrist")}
    both = {name: torch.stack([earlier[name], batch[name]], dim=1) for name in twice}
    io["acted_after_another"] = acted(both)
    save("diffusion", policy, (before, after), io)


def names() -> None:
    """Of ACT for ALOHA, and of the diffusion policy with its defaults but for group norm; what is
    computed is left out."""
    types = importlib.import_module("lerobot.configs.types")
    feature, kinds = types.PolicyFeature, types.FeatureType
    wanted = {
        "act": (("ACTConfig", "ACTPolicy"), (3, 480, 640), 14, {}),
        "diffusion": (("DiffusionConfig", "DiffusionPolicy"), (3, 96, 96), 2,
                      {"use_group_norm": True}),
    }  # fmt: skip
    for kind, ((config, policy), picture, dim, options) in wanted.items():
        place = f"lerobot.policies.{kind}"
        built = getattr(importlib.import_module(f"{place}.configuration_{kind}"), config)(
            input_features={
                "observation.images.top": feature(type=kinds.VISUAL, shape=picture),
                "observation.state": feature(type=kinds.STATE, shape=(dim,)),
            },
            output_features={"action": feature(type=kinds.ACTION, shape=(dim,))},
            device="cpu", pretrained_backbone_weights=None, **options,
        )  # fmt: skip
        made = getattr(importlib.import_module(f"{place}.modeling_{kind}"), policy)(built)
        lines = sorted(
            f"{name} {list(tensor.shape)}" for name, tensor in made.state_dict().items()
            if "pos_enc" not in name and "pos_grid" not in name
        )  # fmt: skip
        print(kind, len(lines), hashlib.sha256("\n".join(lines).encode()).hexdigest())


if __name__ == "__main__":
    globals()[sys.argv[1]]()
