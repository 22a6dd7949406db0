"""How a pair or group of workers communicates on an accelerator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CollectiveGroupOptions:
    """Settings of one communicator; the first communication of a pair or group decides them.

    The first four are handed to the accelerator's collective library (for NVIDIA the options of
    ``ProcessGroupNCCL``) and mean nothing for CPU tensors.
    """

    accel_cluster_size: int | None = None
    """Thread-block cluster size of communication kernels; None lets the library choose."""

    accel_max_ctas: int | None = None
    """Most thread blocks a communication kernel may use: more is faster communication and less
    compute for everything else on the device."""

    accel_min_ctas: int | None = None
    """Fewest thread blocks a communication kernel may use."""

    is_high_priority_stream: bool = False
    """Whether communication kernels run on a high-priority stream."""

    use_ring_broadcast: bool = False
    """Whether a broadcast of several tensors is pipelined: the source sends each tensor to the
    first receiver only, and that one passes it on while the next is on its way."""

    def is_empty_options(self) -> bool:
        """Whether every setting has its default."""
        return self == CollectiveGroupOptions()
