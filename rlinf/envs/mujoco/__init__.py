"""What adapters of MuJoCo simulators share: models that are compiled once, and pictures."""
