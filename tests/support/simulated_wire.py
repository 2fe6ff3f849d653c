"""What a simulated pipeline has in the place of sockets and devices; see `simulated_net`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from keystage.models.blocks import BLOCK_TOKENS
from keystage.wire import api
from keystage.worker.executor import Activation, EmulatedExecutor, StepOutput

Posted = tuple[api.Message, bytes | None]


class Net:
    """Queues per (sender, receiver)."""

    def __init__(self) -> None:
        self.queues: dict[tuple[str, str], deque[Posted]] = {}

    def post(self, sender: str, to: str, message: api.Message, payload: bytes | None) -> None:
        self.queues.setdefault((sender, to), deque()).append((message, payload))

    def waiting(self) -> list[tuple[str, str]]:
        return sorted(pair for pair, queue in self.queues.items() if queue)


class NetMailbox:
    """What `Mailbox` does, over `Net`."""

    refused = 0

    def __init__(self, net: Net, address: str) -> None:
        self.net = net
        self.address = address

    def send(self, to: str, message: api.Message, payload: memoryview | None = None) -> bool:
        self.net.post(self.address, to, message, None if payload is None else bytes(payload))
        return True

    def is_near(self, peer: str) -> bool:
        del peer
        return True

    def unreachable(self, peer: str) -> str | None:
        del peer
        return None

    def broken(self) -> list[str]:
        return []

    def forget(self, peer: str) -> None:
        self.net.queues.pop((self.address, peer), None)

    def close(self, linger_s: float = 0.0) -> None:
        del linger_s


class CheckedExecutor(EmulatedExecutor):
    """Refuses to run a row that has no blocks for its tokens, or does not follow what it has."""

    def step(
        self, first: int, last: int, ids: Sequence[int], activation: Activation | None, rows: api.StepRows
    ) -> StepOutput:
        for session, position, count in zip(rows.sessions, rows.positions, rows.counts, strict=True):
            assert len(self._pool.table(session)) * BLOCK_TOKENS >= position + count
        return super().step(first, last, ids, activation, rows)
