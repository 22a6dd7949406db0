"""Supervised training of a small π₀, ACT or diffusion policy beside lerobot's, in one run.

``OMP_NUM_THREADS=1 python benchmarks/vla_training.py --lerobot PYTHON`` lets both take turns, each
in a process of its own: the same sizes of the network, one picture of 56 × 56, states of 8 numbers,
chunks of 8 actions of 7 numbers, batches of 16 rows, AdamW, clipped gradients, float32, one core;
π₀ reads 6 tokens as well. ``--model act`` or ``diffusion`` takes another one. It prints optimizer
steps per second of both, also per second of the processor, which other work on it disturbs less,
and the ratios. PYTHON is of an environment with lerobot 0.6.1
(``tests/models/visuomotor/make_parity.py`` says how it is made); its side is ``forward`` of its
policy, of the last two its pipeline of normalisation too, with what its trainer does around it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
ROWS, TOKENS, VOCABULARY, IMAGE, HORIZON, ACTIONS, STATES = 16, 6, 64, 56, 8, 7, 8
CHANNELS, LEVELS = (16, 32, 64, 64), (64, 128)
WARM = 5


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "pictures": torch.randint(
            0, 256, (ROWS, IMAGE, IMAGE, 3), dtype=torch.uint8, generator=generator
        ),
        "states": torch.randn(ROWS, STATES, generator=generator),
        "actions": torch.rand(ROWS, HORIZON, ACTIONS, generator=generator) * 2 - 1,
        "tokens": torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator),
    }


# -- our side -----------------------------------------------------------------------------------


def pi0_section() -> Any:
    from rlinf.models.vla.flow_matching import fill_fresh
    from rlinf.models.vla.pi0 import policy as pi0_policy
    from rlinf.models.vla.pi0.config import PI0Config
    from rlinf.models.vla.pi0.network import PI0Network, PI0Size
    from rlinf.models.vla.transformer import TransformerSize

    def network(*_: Any, seed: int) -> PI0Network:
        size = PI0Size(
            adaptive=False, vision=TransformerSize(32, 2, 64), language=TransformerSize(64, 2, 128),
            expert=TransformerSize(32, 2, 64), vision_heads=4, heads=8, head_dim=16,
            vocabulary=VOCABULARY, patch=14, image=IMAGE, horizon=HORIZON, action_dim=ACTIONS,
            state_dim=STATES,
        )  # fmt: skip
        made = PI0Network(size)
        fill_fresh(made, torch.Generator().manual_seed(seed))
        return made

    def encode(text: str) -> list[int]:
        return list(batch()["tokens"][0].tolist())

    pi0_policy.PI0Policy._network = lambda self, *given, seed: network(*given, seed=seed)  # type: ignore[method-assign]
    pi0_policy.tiny_encoder = lambda: (encode, encode)  # type: ignore[attr-defined]
    return PI0Config(preset="tiny", num_action_chunks=HORIZON, horizon=HORIZON)


def act_section() -> Any:
    from rlinf.models.visuomotor.act import ACTNetwork, ACTSize
    from rlinf.models.visuomotor.act_policy import ACTPolicy
    from rlinf.models.visuomotor.config import ACTConfig
    from rlinf.models.visuomotor.resnet import ResNetSize

    size = ACTSize(
        backbone=ResNetSize((1, 1, 1, 1), CHANNELS), width=64, mlp=128, heads=4, encoder_layers=2,
        decoder_layers=1, latent_layers=2, latent=16, horizon=HORIZON, action_dim=ACTIONS,
        state_dim=STATES,
    )  # fmt: skip
    ACTPolicy._tiny_network = lambda *_: ACTNetwork(size)  # type: ignore[method-assign]
    return ACTConfig(preset="tiny", num_action_chunks=HORIZON)


def diffusion_section() -> Any:
    from rlinf.models.visuomotor.config import DiffusionConfig
    from rlinf.models.visuomotor.diffusion_policy import DiffusionPolicy
    from rlinf.models.visuomotor.resnet import ResNetSize
    from rlinf.models.visuomotor.unet import DiffusionNetwork, DiffusionSize

    size = DiffusionSize(
        backbone=ResNetSize((1, 1, 1, 1), CHANNELS, "group"), key_points=16, horizon=HORIZON,
        action_dim=ACTIONS, state_dim=STATES, channels=LEVELS, step_width=32,
    )  # fmt: skip
    DiffusionPolicy._tiny_network = lambda *_: DiffusionNetwork(size)  # type: ignore[method-assign]
    return DiffusionConfig(preset="tiny", num_action_chunks=HORIZON)


def ours(model: str) -> Any:
    """One optimizer step of the trainer on a batch."""
    from rlinf.algorithms.batch import Batch
    from rlinf.algorithms.supervised import Supervised, with_noise
    from rlinf.envs.spec import EnvSpec
    from rlinf.models.policy import RAW_ACTIONS
    from rlinf.trainers.config import OptimizerConfig, RowTrainerConfig
    from rlinf.trainers.trainer import Trainer

    seen = batch()
    spec = EnvSpec(
        observation_shapes={"states": (STATES,), "main_images": (IMAGE, IMAGE, 3)},
        observation_dtypes={"states": "float32", "main_images": "uint8"},
        action_kind="continuous", action_dim=ACTIONS, action_low=(-1.0,) * ACTIONS,
        action_high=(1.0,) * ACTIONS, task_descriptions=("push",), max_episode_steps=100,
    )  # fmt: skip
    policy = MODELS[model][0]().build(spec, value_dim=0, seed=0)
    config = RowTrainerConfig(
        global_batch_size=ROWS, optim=OptimizerConfig(lr=2.5e-5, max_grad_norm=1.0)
    )
    trainer = Trainer({"policy": policy}, Supervised("model"), config, total_steps=1, seed=0)
    inputs = {
        "states": seen["states"], "main_images": seen["pictures"], RAW_ACTIONS: seen["actions"]
    }  # fmt: skip
    mask = torch.ones(ROWS, HORIZON * ACTIONS)
    count = iter(range(1 << 30))

    def step() -> None:
        rows = Batch.of(inputs=inputs, mask=mask)
        number = next(count)
        trainer.train([with_noise(rows, policy.imitation_noise, (0, number))], number)

    return step, policy


# -- lerobot's side -----------------------------------------------------------------------------


def features() -> dict[str, Any]:
    types = importlib.import_module("lerobot.configs.types")
    feature, kinds = types.PolicyFeature, types.FeatureType
    return {
        "device": "cpu",
        "input_features": {
            "observation.images.base": feature(type=kinds.VISUAL, shape=(3, IMAGE, IMAGE)),
            "observation.state": feature(type=kinds.STATE, shape=(STATES,)),
        },
        "output_features": {"action": feature(type=kinds.ACTION, shape=(ACTIONS,))},
    }


def its_pi0() -> Any:
    parity = importlib.import_module("tests.models.vla.make_parity")
    module = importlib.import_module("lerobot.policies.pi0.modeling_pi0")
    settings = importlib.import_module("lerobot.policies.pi0.configuration_pi0")
    parity.tiny(module)
    config = settings.PI0Config(
        dtype="float32", chunk_size=HORIZON, n_action_steps=HORIZON, max_state_dim=STATES,
        max_action_dim=ACTIONS, image_resolution=(IMAGE, IMAGE), **features(),
    )  # fmt: skip
    policy = module.PI0Policy(config)
    parity.with_small_vocabulary(policy.model)
    return policy, lambda inputs: inputs


def its_act() -> Any:
    return small_policy(
        "act", "ACT", chunk_size=HORIZON, n_action_steps=HORIZON, dim_model=64, dim_feedforward=128,
        n_heads=4, n_encoder_layers=2, n_decoder_layers=1, n_vae_encoder_layers=2, latent_dim=16,
        dropout=0.0,
    )  # fmt: skip


def its_diffusion() -> Any:
    return small_policy(
        "diffusion", "Diffusion", n_obs_steps=1, horizon=HORIZON, n_action_steps=HORIZON,
        down_dims=LEVELS, use_group_norm=True, spatial_softmax_num_keypoints=16,
        diffusion_step_embed_dim=32,
    )  # fmt: skip


def small_policy(kind: str, name: str, **options: Any) -> Any:
    """Its policy with a ResNet that is small, and what its trainer lets a batch go through."""
    parity = importlib.import_module("tests.models.visuomotor.make_parity")
    importlib.import_module("torchvision").models.resnet18 = parity.small(*CHANNELS)
    place = f"lerobot.policies.{kind}"
    settings = importlib.import_module(f"{place}.configuration_{kind}")
    config = getattr(settings, f"{name}Config")(
        pretrained_backbone_weights=None, **options, **features()
    )
    module = importlib.import_module(f"{place}.modeling_{kind}")
    policy = getattr(module, f"{name}Policy")(config)
    bounds = {"mean": 0.0, "std": 1.0, "min": -1.0, "max": 1.0}

    def known(*shape: int) -> dict[str, Tensor]:
        return {name: torch.full(shape, value) for name, value in bounds.items()}

    made = importlib.import_module(f"{place}.processor_{kind}")
    before, _ = getattr(made, f"make_{kind}_pre_post_processors")(config, {
        "observation.images.base": known(3, 1, 1), "observation.state": known(STATES),
        "action": known(ACTIONS),
    })  # fmt: skip
    return policy, before


def lerobots(model: str) -> Any:
    """One step of its policy, loss, clipping and optimizer."""
    sys.path.insert(0, str(ROOT))
    policy, before = MODELS[model][1]()
    policy.train()
    trained = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2.5e-5)
    seen = batch()
    # Its data loader gives pictures as numbers from 0 to 1, channels first.
    inputs = {
        "observation.images.base": seen["pictures"].permute(0, 3, 1, 2).float() / 255,
        "observation.state": seen["states"],
        "action": seen["actions"],
        "action_is_pad": torch.zeros(ROWS, HORIZON, dtype=torch.bool),
        "observation.language.tokens": seen["tokens"],
        "observation.language.attention_mask": torch.ones(ROWS, TOKENS, dtype=torch.bool),
    }
    if model == "diffusion":  # of one observation, in a time of its own
        inputs["observation.state"] = inputs["observation.state"].unsqueeze(1)

    def step() -> None:
        loss, _ = policy.forward(before(inputs))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, policy


MODELS = {
    "pi0": (pi0_section, its_pi0),
    "act": (act_section, its_act),
    "diffusion": (diffusion_section, its_diffusion),
}


def measure(side: str, model: str, steps: int) -> None:
    """Print optimizer steps of one side per second, and per one of the processor, and the numbers
    that it trains."""
    torch.set_num_threads(1)
    step, policy = (ours if side == "ours" else lerobots)(model)
    for _ in range(WARM):
        step()
    begun, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    seconds, worked = time.perf_counter() - begun, time.process_time() - worked
    numbers = sum(parameter.numel() for parameter in policy.parameters())
    print(steps / seconds, steps / worked, numbers)


# -- turns --------------------------------------------------------------------------------------


def turn(python: str, side: str, model: str, steps: int) -> tuple[float, float, int]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [python, __file__, "--side", side, "--model", model, "--steps", f"{steps}"]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if found.returncode:
        sys.exit(f"{side} failed:\n{found.stderr[-2000:]}")
    rate, of_processor, numbers = found.stdout.split()[-3:]
    return float(rate), float(of_processor), int(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lerobot", metavar="PYTHON", help="of an environment with lerobot")
    parser.add_argument("--model", choices=list(MODELS), default="pi0")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="measured ones of a turn")
    parser.add_argument("--side", choices=["ours", "lerobot"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        measure(arguments.side, arguments.model, arguments.steps)
        return
    if arguments.lerobot is None:
        parser.error("--lerobot is missing")
    pairs = []
    for _ in range(arguments.turns):
        *mine, own = turn(sys.executable, "ours", arguments.model, arguments.steps)
        *its, theirs = turn(arguments.lerobot, "lerobot", arguments.model, arguments.steps)
        if abs(own - theirs) > 2 * VOCABULARY * 32:  # its expert has a head that nothing reads
            sys.exit(f"the networks are of different sizes: {own:,} and {theirs:,} numbers")
        pairs.append((mine, its))
        print(
            f"rlinf {mine[0]:6.2f} steps/s ({own:,} numbers), lerobot {its[0]:6.2f} ({theirs:,}); "
            f"per second of the processor {mine[1]:6.2f} and {its[1]:6.2f}"
        )
    for kind, name in enumerate(("steps/s", "steps per second of the processor")):
        own_rate, its_rate = (
            statistics.median(pair[side][kind] for pair in pairs) for side in (0, 1)
        )
        ratio = statistics.median(one[kind] / other[kind] for one, other in pairs)
        print(f"median: rlinf {own_rate:.2f}, lerobot {its_rate:.2f} {name}; ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
