"""Stand-in for RLinf's file of this name: its names, numbers of starts, options and flags.

The gripper is a point, which closed takes an object within 4 cm along; the object is on the plate
within 4 cm.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.registration import register_env

CARROT_DATASET_DIR = (
    Path(os.getenv("MANISKILL_ASSET_DIR", Path(__file__).parent / ".." / "assets")) / "carrot"
)
PLACES, TURNS = 6, 4


class PutOnPlateInScene25(BaseEnv):
    SUPPORTED_OBS_MODES = ("rgb+segmentation",)

    def __init__(self, **kwargs):
        self.xyz_configs, self.quat_configs = list(range(PLACES)), list(range(TURNS))
        print("xyz_configs: (1160, 2, 3)")
        count = kwargs["num_envs"]
        self.carrot, self.plate, self.gripper, self.target = (
            torch.zeros(count, 3) for _ in range(4)
        )
        self.qpos = torch.zeros(count, 8)
        self.agent = SimpleNamespace(robot=SimpleNamespace(get_qpos=lambda: self.qpos))
        super().__init__(robot_uids="widowx250s_bridgedataset_flat_table", **kwargs)
        assert self.control_mode == "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"

    def _initialize_episode(self, env_idx, options):
        self._initialize_episode_pre(env_idx, options)
        along = 0.02 * self.select_pos_ids[env_idx].float()
        turned = 0.01 * self.select_quat_ids[env_idx].float()
        self.set_pose(self.carrot, torch.stack([along, turned, 0 * along], 1))
        self.set_pose(self.plate, torch.stack([along, turned + 0.2, 0 * along], 1))
        self.set_pose(self.gripper, torch.tensor([0.0, 0.0, 0.2]))
        self.set_pose(self.qpos, torch.full((8,), 0.037))
        if not hasattr(self, "consecutive_grasp"):
            rows = self.num_envs
            self.consecutive_grasp = torch.zeros(rows, dtype=torch.int32)
            names = ("is_src_obj_grasped", "consecutive_grasp", "src_on_target")
            self.episode_stats = {name: torch.zeros(rows, dtype=torch.bool) for name in names}
        self.consecutive_grasp[env_idx] = 0
        for flags in self.episode_stats.values():
            flags[env_idx] = False

    def _reset_controllers(self):
        self.target = self.gripper.clone()

    def _act(self, action):
        self.closed = action[:, 6] < 0
        self.target += action[:, :3]
        before, self.gripper = self.gripper, self.target.clone()
        holds = self.closed & ((before - self.carrot).norm(dim=1) < 0.04)
        self.carrot[holds] = self.gripper[holds]
        self.qpos[:, :3] = self.gripper

    def evaluate(self):
        closed = getattr(self, "closed", torch.zeros(self.num_envs, dtype=torch.bool))
        grasped = closed & ((self.gripper - self.carrot).norm(dim=1) < 0.04)
        self.consecutive_grasp += grasped
        self.consecutive_grasp[~grasped] = 0
        success = (self.carrot - self.plate).norm(dim=1) < 0.04
        # The mapping holds the flags themselves, which the next steps write to.
        self.episode_stats["src_on_target"] = success
        self.episode_stats["is_src_obj_grasped"] |= grasped
        self.episode_stats["consecutive_grasp"] |= self.consecutive_grasp >= 5
        return {**self.episode_stats, "success": success}

    def get_language_instruction(self):
        told = zip(self.select_carrot_ids.tolist(), self.select_plate_ids.tolist(), strict=True)
        return [self._instruction(carrot, plate) for carrot, plate in told]

    def _instruction(self, carrot, plate):
        carrot = self.model_db_carrot[self.carrot_names[carrot]]["name"]
        return f"put {carrot} on {self.model_db_plate[self.plate_names[plate]]['name']}"

    def get_obs(self, info):
        shade = (100 + 200 * self.gripper[:, 1] + self.select_overlay_ids).clamp(1, 255)
        rgb = shade.to(torch.uint8).view(-1, 1, 1, 1).expand(self.num_envs, 480, 640, 3)
        pictures = {"rgb": rgb.clone(), "segmentation": torch.zeros(self.num_envs, 480, 640, 1)}
        return {"agent": {}, "extra": {}, "sensor_data": {"3rd_view_camera": pictures}}


@register_env(
    "PutOnPlateInScene25Main-v3", max_episode_steps=80, asset_download_ids=["bridge_v2_real2sim"]
)
class PutOnPlateInScene25MainV3(PutOnPlateInScene25):
    def __init__(self, obj_set, use_multiple_plates=False, **kwargs):
        self.obj_set, self.use_multiple_plates = obj_set, use_multiple_plates
        self._prep_init()
        super().__init__(**kwargs)

    def _prep_init(self):
        self.model_db_carrot, self.model_db_plate = (
            json.loads((CARROT_DATASET_DIR / name / "model_db.json").read_text())
            for name in ("more_carrot", "more_plate")
        )
        if not self.use_multiple_plates:
            self.model_db_plate = dict(list(self.model_db_plate.items())[:1])
        self.carrot_names, self.plate_names = list(self.model_db_carrot), list(self.model_db_plate)

    @property
    def basic_obj_infos(self):
        lc, lc_offset, lo, lo_offset = {
            "train": (16, 0, 16, 0), "test": (9, 16, 5, 16), "all": (25, 0, 21, 0),
        }[self.obj_set]  # fmt: skip
        return lc, lc_offset, lo, lo_offset, len(self.plate_names), 0, PLACES, TURNS

    @property
    def total_num_trials(self):
        lc, _, lo, _, lp, _, l1, l2 = self.basic_obj_infos
        return lc * lp * lo * l1 * l2

    def _reset_episode_idx(self, env_idx, ltt, options):
        drawn = torch.randint(0, ltt, (len(env_idx),))
        given = options.get("episode_id", drawn)
        if len(env_idx) == self.num_envs:
            self.episode_id = given.reshape(self.num_envs) % ltt
        else:
            self.episode_id[env_idx] = given

    def _initialize_episode_pre(self, env_idx, options):
        _, lc_offset, lo, lo_offset, lp, lp_offset, l1, l2 = self.basic_obj_infos
        self._reset_episode_idx(env_idx, self.total_num_trials, options)
        self.select_carrot_ids = self.episode_id // (lp * lo * l1 * l2) + lc_offset
        self.select_plate_ids = self.episode_id // (lo * l1 * l2) % lp + lp_offset
        self.select_overlay_ids = self.episode_id // (l1 * l2) % lo + lo_offset
        self.select_pos_ids = self.episode_id // l2 % l1
        self.select_quat_ids = self.episode_id % l2
