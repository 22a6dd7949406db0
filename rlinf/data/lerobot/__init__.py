"""Sets of episodes in the format LeRobotDataset v3.0, read and written without lerobot."""
