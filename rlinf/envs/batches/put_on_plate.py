"""PutOnPlateInScene25: a WidowX arm puts an object on a plate, in ManiSkill, a batch on a GPU.

The scenes are those of RL4VLA (Liu et al. 2025, arXiv 2505.19789) as RLinf has them. There is no
package: the environment is given a checkout of RLinf, of which only the files of these tasks are
imported, by their place. They name each other as modules of a package that is called as this one
is, ``rlinf.envs.maniskill.tasks``; this one has no such modules, so neither hides the other.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from rlinf.envs.base import (
    PICTURE_SIZES,
    BatchStep,
    Observation,
    SimulatorBatch,
    quiet,
    require_known,
    require_package,
    require_within,
)
from rlinf.envs.batches import row_space, to_numpy
from rlinf.envs.requirements import Requirements, source_folder
from rlinf.errors import ConfigError

FOLDER = "rlinf/envs/maniskill/tasks"
"""Where the files of the tasks lie in a checkout."""
SCENE = "put_on_in_scene_multi"
"""The file that the others build on."""


@dataclass(frozen=True)
class Variant:
    """A task of the family."""

    file: str = ""
    """The file below ``variants`` that has it; empty: :data:`SCENE`."""
    together: bool = False
    """Whether its scene resets all rows or none."""
    phrases: bool = False
    """Whether the words around the names of the objects differ between episodes."""


MAIN = "PutOnPlateInScene25Main-v3"
TASKS = {
    MAIN: Variant(),
    "PutOnPlateInScene25VisionImage-v1": Variant("vision_image"),
    "PutOnPlateInScene25VisionTexture03-v1": Variant("vision_texture", together=True),
    "PutOnPlateInScene25VisionTexture05-v1": Variant("vision_texture", together=True),
    "PutOnPlateInScene25VisionWhole03-v1": Variant("vision_whole", together=True),
    "PutOnPlateInScene25VisionWhole05-v1": Variant("vision_whole", together=True),
    "PutOnPlateInScene25Carrot-v1": Variant("carrot"),
    "PutOnPlateInScene25Plate-v1": Variant("plate"),
    "PutOnPlateInScene25Instruct-v1": Variant("instruct", phrases=True),
    "PutOnPlateInScene25MultiCarrot-v1": Variant("multi_carrot", together=True),
    "PutOnPlateInScene25MultiPlate-v1": Variant("multi_plate", together=True),
    "PutOnPlateInScene25Position-v1": Variant("position"),
    "PutOnPlateInScene25EEPose-v1": Variant("ee_pose", together=True),
    "PutOnPlateInScene25PositionChangeTo-v1": Variant("position_change", together=True),
}
"""The task that is trained on, then those of the published evaluation out of distribution: five of
vision, five of semantics, three of execution."""

OBJECTS = ("train", "test", "all")
REWARDS = ("shaped", "sparse")
ASSETS = ("more_carrot", "more_plate", "more_table")
ASSETS_VARIABLE = "MANISKILL_ASSET_DIR"
"""Read by the files of the tasks, when they are imported."""
CONTROL_MODE = "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"
CAMERA = "3rd_view_camera"
_NO_LIMIT = 10**9
"""Time limits belong to the host."""


@dataclass(frozen=True)
class PutOnPlateOptions:
    """Options of the ``put_on_plate`` env type."""

    task: str = MAIN
    """Task: that of training, or one of the evaluation out of distribution."""

    objects: str = "train"
    """What differs between episodes is drawn from what training sees, ``train``, from what is kept
    for evaluations, ``test``, or from both, ``all``: objects and backgrounds, and in the variants
    plates, textures, phrases or places."""

    plates: str = "one"
    """``one``, or ``all`` 17 of them, for the task of training alone: those of evaluations say
    themselves which plates they have."""

    reward: str = "shaped"
    """``shaped``: 0.1 once the object was grasped, 0.1 once it was held for five steps in a row, 1
    while it lies on the plate; ``sparse``: the last alone. Both are given as they change."""

    image_size: int = 224
    """Height and width of ``main_images``, to which the camera's 480 x 640 pixels are squeezed; 0
    keeps them."""

    assets: str = ""
    """Folder with ``carrot``, the objects, plates and tables; by default that of the variable
    MANISKILL_ASSET_DIR, else ``rlinf/envs/maniskill/assets`` of the checkout."""


class PutOnPlateEnv(SimulatorBatch):
    """One of 25 objects is put on a plate, seen by one camera; success ends an episode.

    ``main_images``, and ``states`` [8]: the joints of arm and gripper. Actions [7], five a second,
    move and turn the pose that was asked for last (metres, radians; not scaled); the last dimension
    is the gripper, 1 open to -1 closed.

    Success is the scene's own: the object touches the plate with more than 0.03 N, its middle is
    above that of the plate, at most half of the plate's longest side and 1 cm from it along the
    table, and at most 5 cm higher than where it would lie.

    What there is to do is the table of tasks, n texts of the scene; seed s plays number ``s % n``,
    from a start that s draws from all that the scene has with these words.
    """

    Options = PutOnPlateOptions
    requirements = Requirements(
        packages=(
            "mani-skill==3.0.0b22",
            "torch==2.13.0",
            "gymnasium==0.29.1",
            "opencv-python==4.11.0.86",
        ),
        module="mani_skill",
        download_mb=3500,
        disk_mb=7000,
        licence="Apache-2.0; assets their own",
        libraries={"libGL.so.1": "libgl1"},
        variables={"MS_SKIP_ASSET_DOWNLOAD_PROMPT": "1"},
        source="a checkout of github.com/RLinf/RLinf",
        source_folders=(FOLDER,),
        assets="`python -m mani_skill.utils.download_asset UID -y` of its environment for the UIDs "
        "bridge_v2_real2sim and widowx250s, and the data set RLinf/maniskill_assets of the Hugging "
        "Face hub as rlinf/envs/maniskill/assets of the checkout, or as options.assets",
        accelerator=True,
    )
    never_black = ("main_images",)
    control_rate = 5.0

    def __init__(self, options: PutOnPlateOptions, num_envs: int) -> None:
        super().__init__(options, num_envs)
        if options.assets:
            os.environ[ASSETS_VARIABLE] = options.assets
        self._variant = TASKS[options.task]
        with quiet():
            _import_task(self._variant)
            import gymnasium
            import torch

            self._torch: Any = torch
            self._env: Any = gymnasium.make(
                options.task,
                num_envs=num_envs,
                obs_mode="rgb+segmentation",
                control_mode=CONTROL_MODE,
                sim_backend="gpu",
                sensor_configs={"shader_pack": "default"},
                max_episode_steps=_NO_LIMIT,
                obj_set=options.objects,
                use_multiple_plates=options.plates == "all",
            )
        scene: Any = self._env.unwrapped
        self._scene = scene
        self._starts, self.task_descriptions = self._worded()
        self._ids = np.zeros(num_envs, np.int64)
        self._tasks = np.zeros(num_envs, np.int64)
        self._earned = np.zeros(num_envs, np.float32)
        everything = np.arange(num_envs)
        self.observation_space = row_space(self.reset(everything, everything))
        limits = scene.single_action_space
        self.action_space = spaces.Box(
            np.asarray(limits.low, np.float32), np.asarray(limits.high, np.float32)
        )

    @classmethod
    def check(cls, options: PutOnPlateOptions, max_episode_steps: int) -> None:
        """Refuse what the family has not, and a source without its files or assets."""
        require_package("put_on_plate", cls.requirements)
        require_known("task", options.task, tuple(TASKS))
        require_known("objects", options.objects, OBJECTS)
        require_known(
            "plates", options.plates, ("one", "all") if options.task == MAIN else ("one",)
        )
        require_known("reward", options.reward, REWARDS)
        if options.image_size:
            require_within("image_size", options.image_size, *PICTURE_SIZES)
        for file in _files(TASKS[options.task]):
            if not file.is_file():
                raise ConfigError(
                    f"no file {file}; `rlinf env install put_on_plate --source DIR` with DIR "
                    f"{cls.requirements.source}",
                    key="type",
                )
        place = (
            options.assets
            or os.environ.get(ASSETS_VARIABLE)
            or source_folder() / FOLDER / "../assets"
        )
        for name in ASSETS:
            if not (Path(place) / "carrot" / name / "model_db.json").is_file():
                raise ConfigError(
                    f"no file carrot/{name}/model_db.json in {Path(place).resolve()}; "
                    f"{cls.requirements.assets}",
                    key="options.assets",
                )

    @classmethod
    def begins_together(cls, options: PutOnPlateOptions) -> bool:
        """Whether the scene resets all rows or none."""
        return TASKS.get(options.task, Variant()).together

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> Observation:
        """Start episodes in some rows; where a scene resets all, those at rest start anew."""
        some = len(rows) < self.num_envs and not self._variant.together
        count = len(self.task_descriptions)
        self._tasks[rows] = seeds % count
        for row, seed in zip(rows.tolist(), seeds.tolist()):  # noqa: B905 - Python 3.8
            drawn = np.random.default_rng(seed).integers(self._starts)
            self._ids[row] = seed % count * self._starts + drawn
        # Poses are set in the order of the rows, whatever the order in which rows are named.
        named = np.sort(rows) if some else np.arange(self.num_envs)
        given = {"episode_id": self._tensor(self._ids[named])}
        if some:
            given["env_idx"] = self._tensor(named)
        seen, _ = self._env.reset(options=given)
        self._require_words(rows)
        self._earned[rows] = 0.0
        self._seen = seen
        return self._observed(seen)

    def step(self, actions: np.ndarray) -> BatchStep:
        """Execute one action [N, 7]."""
        seen, _, terminated, truncated, info = self._env.step(self._tensor(actions))
        success = to_numpy(info["success"]).astype(bool)
        worth = self._worth(info, success)
        rewards, self._earned = worth - self._earned, worth
        self._seen = seen
        return BatchStep(
            observations=lambda: self._observed(seen),
            rewards=rewards,
            terminated=to_numpy(terminated).astype(bool),
            truncated=to_numpy(truncated).astype(bool),
            success=success,
        )

    def task_ids(self) -> np.ndarray:
        """[N] int64, what each row is told to do."""
        return self._tasks

    def render(self, row: int) -> np.ndarray:
        """Return the picture that the policy sees."""
        frame: np.ndarray = self._pictures(self._seen, slice(row, row + 1))[0]
        return frame

    def close(self) -> None:
        """End the simulation."""
        self._env.close()

    def _worded(self) -> tuple[int, tuple[str, ...]]:
        """How many starts there are with the same words, and the words; the scene numbers its
        starts so that those with the same words follow each other."""
        scene, rows = self._scene, np.arange(self.num_envs)
        # Objects, backgrounds and plates, each with where they begin; then places and turns; then
        # what a variant has besides.
        objects, _, _, _, plates, *others = scene.basic_obj_infos
        count = int(objects * plates * (others[3] if self._variant.phrases else 1))
        starts = int(scene.total_num_trials) // count
        words: list[str] = []
        for first in range(0, count, self.num_envs):
            ids = (first + rows) % count * starts
            # It chooses what the starts show, and moves nothing.
            scene._initialize_episode_pre(self._tensor(rows), {"episode_id": self._tensor(ids)})
            words += map(str, scene.get_language_instruction())
        return starts, tuple(words[:count])

    def _require_words(self, rows: np.ndarray) -> None:
        """Rows are told what their scenes hold, also where a later source numbers them anew."""
        words = self._scene.get_language_instruction()
        for row in rows.tolist():
            told = self.task_descriptions[self._tasks[row]]
            if words[row] != told:
                raise RuntimeError(
                    f"start {self._ids[row]} of {self.options.task} is {words[row]!r} and not "
                    f"{told!r}: its source numbers starts in another way than that which this "
                    "adapter was written for"
                )

    def _worth(self, info: Any, success: np.ndarray) -> np.ndarray:
        """[N] float32, what each row has earned so far."""
        if self.options.reward == "sparse":
            return success.astype(np.float32)
        grasped = to_numpy(info["is_src_obj_grasped"]).astype(bool)
        held = to_numpy(info["consecutive_grasp"]).astype(bool)
        worth: np.ndarray = 0.1 * grasped + 0.1 * held + 1.0 * (success & grasped)
        return worth.astype(np.float32)

    def _observed(self, seen: Any) -> Observation:
        return {
            "main_images": self._pictures(seen, slice(None)),
            "states": to_numpy(self._scene.agent.robot.get_qpos()).astype(np.float32),
        }

    def _pictures(self, seen: Any, rows: slice) -> np.ndarray:
        pictures, size = seen["sensor_data"][CAMERA]["rgb"][rows], self.options.image_size
        if size:
            channels_first = pictures.permute(0, 3, 1, 2).float()
            squeezed = self._torch.nn.functional.interpolate(
                channels_first, size=(size, size), mode="bicubic", antialias=True
            )
            pictures = squeezed.clamp(0, 255).round().permute(0, 2, 3, 1)
        return np.ascontiguousarray(to_numpy(pictures), np.uint8)

    def _tensor(self, array: np.ndarray) -> Any:
        return self._torch.as_tensor(array, device=self._scene.device)


def _files(variant: Variant) -> list[Path]:
    """The files of a task, each after those that it imports."""
    folder = source_folder() / FOLDER
    names = [SCENE]
    if variant.file:
        names += ["variants/utils", f"variants/put_on_plate_25_{variant.file}"]
    return [folder / f"{name}.py" for name in names]


def _import_task(variant: Variant) -> None:
    """Register a task; its files are known by the names under which they import each other."""
    for file in _files(variant):
        name = ".".join(file.relative_to(source_folder()).with_suffix("").parts)
        if name in sys.modules:
            continue
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
