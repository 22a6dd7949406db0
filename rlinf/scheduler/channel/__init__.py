"""Channels: queues between workers."""

from rlinf.scheduler.channel.channel import Channel

__all__ = ["Channel"]
