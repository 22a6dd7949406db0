from mani_skill.utils.registration import register_env
from rlinf.envs.maniskill.tasks.put_on_in_scene_multi import PutOnPlateInScene25MainV3

PHRASES = [f"put the {{}} on the {{}}, phrase {number}" for number in range(21)]


@register_env("PutOnPlateInScene25Instruct-v1", max_episode_steps=80)
class PutOnPlateInScene25Instruct(PutOnPlateInScene25MainV3):
    @property
    def basic_obj_infos(self):
        le, le_offset = {"train": (1, 0), "test": (16, 1), "all": (17, 0)}[self.obj_set]
        places = len(self.xyz_configs), len(self.quat_configs)
        return 16, 0, 16, 0, len(self.plate_names), 0, *places, le, le_offset

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

    def get_language_instruction(self):
        return [
            PHRASES[extra].format(carrot, "plate")
            for extra, carrot in zip(
                self.select_extra_ids.tolist(), self.select_carrot_ids.tolist(), strict=True
            )
        ]
