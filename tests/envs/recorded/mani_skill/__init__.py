"""Stand-in for ManiSkill, for tasks that derive from it: a batch of rows on a device."""
