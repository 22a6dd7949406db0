"""Stand-in: joints of a pose in the frame of the base, for the arm of this stand-in."""

import torch


def times(left, right):
    (w, x, y, z), (a, b, c, d) = left.unbind(1), right.unbind(1)
    return torch.stack(
        [
            w * a - x * b - y * c - z * d, w * b + x * a + y * d - z * c,
            w * c - x * d + y * a + z * b, w * d + x * c - y * b + z * a,
        ], dim=1,
    )  # fmt: skip


def rotate(turn, vectors):
    pure = torch.cat([torch.zeros(len(vectors), 1), vectors], dim=1)
    back = turn * torch.tensor([1.0, -1.0, -1.0, -1.0])
    return times(times(turn, pure), back)[:, 1:]


def quaternion(vectors):
    angle = vectors.norm(dim=1, keepdim=True)
    axis = vectors / angle.clamp_min(1e-9)
    return torch.cat([(angle / 2).cos(), axis * (angle / 2).sin()], dim=1)


def rotation_vector(turn):
    turn = torch.where(turn[:, :1] < 0, -turn, turn)
    sine = turn[:, 1:].norm(dim=1, keepdim=True)
    return turn[:, 1:] / sine.clamp_min(1e-9) * 2 * torch.atan2(sine, turn[:, :1])


class IKSolver:
    def __init__(self, robot_cfg, solver="pyroki", no_gnd=False, use_seed=True):
        self.robot_cfg, self.solver = robot_cfg, solver
        self.n_robot_dof = len(robot_cfg.joint_limits)
        self.ee_n_dof = len(robot_cfg.gripper_open_q)
        self.n_dof_ik = len(robot_cfg.actuators) - self.ee_n_dof
        self.seeds = None

    def solve_ik_batch(self, ee_pos_target, ee_quat_target, seed_q=None):
        if seed_q is None:
            raise ValueError("seed_q is required when use_seed=True")
        self.seeds = seed_q[:, : self.n_dof_ik]
        last = torch.zeros(len(ee_pos_target), 1)
        joints = torch.cat([ee_pos_target, rotation_vector(ee_quat_target), last], dim=1)
        return joints, torch.ones(len(joints), dtype=torch.bool)

    def compose_joint_action(self, q_solution, gripper_widths, current_q=None, return_dict=False):
        whole = torch.zeros(len(q_solution), self.n_robot_dof)
        whole[:, : self.n_dof_ik] = q_solution
        whole[:, -self.ee_n_dof :] = gripper_widths
        names = list(self.robot_cfg.actuators)
        if return_dict:
            return [
                {self.robot_cfg.name: {"dof_pos_target": dict(zip(names, row, strict=True))}}
                for row in whole.tolist()
            ]
        return whole[:, [names.index(name) for name in sorted(names)]]


def setup_ik_solver(robot_cfg, solver="pyroki", no_gnd=False, use_seed=True):
    return IKSolver(robot_cfg, solver, no_gnd, use_seed)


def process_gripper_command(gripper_binary, robot_cfg, device):
    opened = torch.tensor(robot_cfg.gripper_open_q, device=device)
    closed = torch.tensor(robot_cfg.gripper_close_q, device=device)
    return torch.where((gripper_binary > 0.5).unsqueeze(1), opened, closed)
