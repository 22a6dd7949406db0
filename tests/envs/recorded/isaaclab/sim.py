"""Stand-in: the simulation, one of a process."""


class SimulationContext:
    _instance = None

    @classmethod
    def instance(cls):
        return cls._instance
