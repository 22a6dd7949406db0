"""Stand-in: the starts of what was recorded, twelve of them."""

import torch

STARTS = 12


def get_traj(traj_filepath, robot, handler=None, v2_as_v3=True):
    generator = torch.Generator().manual_seed(0)
    starts = []
    for number in range(STARTS):
        joints = dict.fromkeys(robot.actuators, 0.0)
        joints.update({"panda_finger_joint1": 0.04, "panda_finger_joint2": 0.04})
        joints["panda_joint1"] = 0.01 * number
        pos = torch.rand(3, generator=generator) * 0.1 + torch.tensor([0.0, 0.25, 0.0])
        upright = torch.tensor([1.0, 0.0, 0.0, 0.0])
        starts.append(
            {
                "objects": {"cube": {"pos": pos, "rot": upright}},
                "robots": {robot.name: {"pos": None, "rot": None, "dof_pos": joints}},
            }
        )
    return starts, None, None
