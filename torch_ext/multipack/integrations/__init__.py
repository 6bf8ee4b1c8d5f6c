"""multipack in the trainers and loops that people already use; each module needs its library."""

from multipack.integrations._ranks import check_ranks

__all__ = ["check_ranks"]
