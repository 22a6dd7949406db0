"""Devices that change hands between rollout and training inside a step: a plug-in."""
