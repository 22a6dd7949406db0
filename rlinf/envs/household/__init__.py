"""Simulators of household work, written against their recorded interface: see docs/simulators.md.

Their assets or the GPU that they need were not to be had where these adapters were written; none
has been run with the real simulator.
"""
