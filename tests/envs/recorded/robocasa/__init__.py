"""Stand-in for rlinf-robocasa365 1.0.1: to import it registers its tasks with gymnasium."""

from robocasa.wrappers.gym_wrapper import RoboCasaGymEnv

print("WARNING: mimicgen environments not imported since mimicgen is not installed!")

__all__ = ["RoboCasaGymEnv"]
