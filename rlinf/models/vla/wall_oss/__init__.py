"""WALL-OSS."""
