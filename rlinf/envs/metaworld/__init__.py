"""MetaWorld: its adapter, its tasks, and faster ways to step them that give the same bits."""
