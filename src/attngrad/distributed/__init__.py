"""Ring attention on torch.distributed: a sequence longer than one machine holds, with the results of one process.

``shard`` gives a rank its tokens, ``ring_attention`` attends over all of them, ``unshard`` brings results together, and
``plan`` says what a job of some size needs before it runs. docs/distributed.md is the guide.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("attngrad.distributed: PyTorch is not installed. Run: pip install 'attngrad[torch]'.") from error

from attngrad.distributed._attention import ring_attention
from attngrad.distributed._plan import Plan, plan
from attngrad.distributed._shard import shard, unshard
from attngrad.distributed._transport import RingError

__all__ = ["Plan", "RingError", "plan", "ring_attention", "shard", "unshard"]


def __dir__() -> list[str]:
    return __all__
