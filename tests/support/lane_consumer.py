"""A process that reads another one's device memory, for tests on a GPU; importable where it is spawned."""

from __future__ import annotations

from multiprocessing.connection import Connection


def consume(connection: Connection) -> None:
    """Maps another process's arena, and answers with what it finds there."""
    import torch

    from keystage.worker.cuda_lane import CudaLaneDriver

    torch.cuda.set_device(0)
    target = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:0")
    driver = CudaLaneDriver(target.device)
    address = driver.map(connection.recv())
    while (offset := connection.recv()) is not None:
        driver.copy(target.data_ptr(), address + offset, target.numel())
        driver.settle()
        connection.send(int(target.long().sum()))
    driver.unmap(address)
