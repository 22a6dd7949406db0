"""dm_control: its adapter, and faster ways to step its tasks that give the same bits."""
