import torch
from mani_skill.utils.registration import register_env
from rlinf.envs.maniskill.tasks.put_on_in_scene_multi import PutOnPlateInScene25MainV3
from rlinf.envs.maniskill.tasks.variants.utils import masks_to_boxes_pytorch


@register_env("PutOnPlateInScene25VisionTexture03-v1", max_episode_steps=80)
class PutOnPlateInScene25VisionTexture03(PutOnPlateInScene25MainV3):
    """It sets poses of all rows, whichever are being reset."""

    overlay_texture_mix_ratio = 0.3

    @property
    def basic_obj_infos(self):
        le, le_offset = {"train": (1, 0), "test": (16, 1), "all": (17, 0)}[self.obj_set]
        return 16, 0, 16, 0, len(self.plate_names), 0, *map(len, self._places), le, le_offset

    @property
    def _places(self):
        return self.xyz_configs, self.quat_configs

    @property
    def total_num_trials(self):
        lc, _, lo, _, lp, _, l1, l2, le, _ = self.basic_obj_infos
        return lc * le * lp * lo * l1 * l2

    def _initialize_episode_pre(self, env_idx, options):
        _, lc_offset, lo, lo_offset, lp, _, l1, l2, le, le_offset = self.basic_obj_infos
        self._reset_episode_idx(env_idx, self.total_num_trials, options)
        self.select_carrot_ids = self.episode_id // (le * lp * lo * l1 * l2) + lc_offset
        self.select_extra_ids = self.episode_id // (lp * lo * l1 * l2) % le + le_offset
        self.select_plate_ids = self.episode_id // (lo * l1 * l2) % lp
        self.select_overlay_ids = self.episode_id // (l1 * l2) % lo + lo_offset
        self.select_pos_ids = self.episode_id // l2 % l1
        self.select_quat_ids = self.episode_id % l2

    def _initialize_episode(self, env_idx, options):
        masks_to_boxes_pytorch(None)
        self.set_pose(self.carrot, torch.zeros(self.num_envs, 3))
        super()._initialize_episode(env_idx, options)


@register_env("PutOnPlateInScene25VisionTexture05-v1", max_episode_steps=80)
class PutOnPlateInScene25VisionTexture05(PutOnPlateInScene25VisionTexture03):
    overlay_texture_mix_ratio = 0.5
