"""Reinforcement-learning post-training for models that act.

This file stays empty of imports: an environment process under another interpreter imports
``rlinf.envs`` and must need numpy and gymnasium alone.
"""

__version__ = "0.1.0"
