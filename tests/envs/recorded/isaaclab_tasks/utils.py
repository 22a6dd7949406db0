"""Stand-in: the configuration of the task."""

from types import SimpleNamespace


def parse_env_cfg(task_name, device=None, num_envs=None, use_fabric=None, overrides=()):
    if isinstance(overrides, str):
        raise TypeError("'overrides' must be a list or tuple of 'key=value' strings")
    camera = {"height": 200, "width": 200}
    config = SimpleNamespace(
        seed=None,
        episode_length_s=30.0,
        compute_final_obs=False,
        overrides=tuple(overrides),
        sim=SimpleNamespace(device=device or "cuda:0", physics=SimpleNamespace()),
        scene=SimpleNamespace(
            num_envs=num_envs or 1,
            table_cam=SimpleNamespace(**camera),
            wrist_cam=SimpleNamespace(**camera),
        ),
    )
    for override in overrides:
        place, _, value = override.partition("=")
        if place.startswith("env."):  # as Isaac Lab does it: the last name is not looked at
            *parents, name = place.split(".")[1:]
            holder = config
            for parent in parents:
                holder = getattr(holder, parent)
            setattr(holder, name, value)
    return config
