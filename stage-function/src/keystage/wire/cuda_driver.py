"""The few calls of the CUDA driver that torch does not offer: pinning in place, IPC handles, lanes.

Below the KeysManager's `pinning`, `device_copy` and `peer_gpu`, and below a worker's `device_lane`. The
driver's interface (libcuda.so.1) is stable over CUDA versions, and ctypes releases the interpreter lock
during calls, so lanes run beside one another; what a lane does in microseconds keeps the lock (`PyDLL`),
since fifteen lanes wait longer for it than that. The primary context is torch's: it must exist when a
`Driver` is made. Never to be used before a fork.
"""

from __future__ import annotations

import ctypes
import functools

READ_ONLY = 8
"""Flag of cuMemHostRegister for memory that this process may only read."""
PORTABLE = 1
"""Flag of cuMemHostRegister for memory that is pinned for every context of the process."""
_READ_ONLY_REGISTER_SUPPORTED = 113
_STREAM_NON_BLOCKING = 1
_EVENT_NO_TIMING = 2
_LAZY_PEER_ACCESS = 1
_NOT_READY = 600
HANDLE_BYTES = 64


class CudaError(Exception):
    """The driver refused; names the call and the driver's word for it."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.name = name


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class Driver:
    """libcuda with checked calls, and the context that was current when it was made.

    Raises:
        CudaError: no driver, or no context.
    """

    def __init__(self) -> None:
        self._lib = _library()
        self._quick = _quick_library()
        self._context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(self._context))
        if not self._context:
            raise CudaError("cuCtxGetCurrent", "no context in this thread")

    def enter(self) -> None:
        """Makes the context current in the calling thread."""
        self._call("cuCtxSetCurrent", self._context)

    def can_register_read_only(self) -> bool:
        """Whether the current device can pin memory that is mapped read-only."""
        device, found = ctypes.c_int(), ctypes.c_int()
        self._call("cuCtxGetDevice", ctypes.byref(device))
        self._call("cuDeviceGetAttribute", ctypes.byref(found), _READ_ONLY_REGISTER_SUPPORTED, device)
        return bool(found.value)

    def register(self, address: int, nbytes: int, flags: int = READ_ONLY) -> None:
        """Pins whole pages in place; by default of memory that is mapped read-only (flags 0: it is not)."""
        self._call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_uint(flags),
        )

    def unregister(self, address: int) -> None:
        """Unpins what was registered at this address."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def stream(self) -> int:
        """A new stream that waits for no other."""
        made = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(made), ctypes.c_uint(_STREAM_NON_BLOCKING))
        return made.value or 0

    def destroy_stream(self, stream: int) -> None:
        """Ends a stream."""
        self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def wait_stream(self, stream: int) -> None:
        """Waits until all that was queued there is done."""
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def event(self) -> int:
        """A new event without timing."""
        made = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(made), ctypes.c_uint(_EVENT_NO_TIMING))
        return made.value or 0

    def destroy_event(self, event: int) -> None:
        """Ends an event."""
        self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def wait_event(self, event: int) -> None:
        """Waits for an event; returns at once when it was never recorded."""
        if self._quick.cuEventQuery(event) == _NOT_READY:
            self._call("cuEventSynchronize", ctypes.c_void_p(event))

    def queue_chunk(self, target: int, source: int, nbytes: int, stream: int, event: int) -> None:
        """Queues a copy from pinned memory and an event behind it, without letting other threads in."""
        self.queue_copy(target, source, nbytes, stream)
        code = self._quick.cuEventRecord(event, stream)
        if code:
            raise CudaError("cuEventRecord", _error_name(self._lib, code))

    def queue_copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queues a copy from pinned memory, without letting other threads in."""
        code = self._quick.cuMemcpyHtoDAsync_v2(target, source, nbytes, stream)
        if code:
            raise CudaError("cuMemcpyHtoDAsync_v2", _error_name(self._lib, code))

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queues a copy from host memory; from pageable memory it returns when the bytes are taken."""
        self._call(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream),
        )

    def copy_between(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queues a copy between any two addresses: of one device, of two, or of the host."""
        self._call(
            "cuMemcpyAsync",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream),
        )

    def base_of(self, address: int) -> int:
        """Start of the allocation that a device address lies in."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        return base.value

    def ipc_handle(self, base: int) -> bytes:
        """Handle by which another process of this machine can map an allocation."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        """Maps another process's allocation; its address here."""
        address = ctypes.c_uint64()
        copied = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), copied, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def ipc_close(self, address: int) -> None:
        """Unmaps another process's allocation."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._lib, name)(*arguments)
        if code:
            raise CudaError(name, _error_name(self._lib, code))


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError("libcuda.so.1", str(error)) from error


@functools.cache
def _quick_library() -> ctypes.PyDLL:
    library = ctypes.PyDLL("libcuda.so.1")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.cuMemcpyHtoDAsync_v2.argtypes = [ctypes.c_uint64, pointer, size, pointer]
    library.cuEventRecord.argtypes = [pointer, pointer]
    library.cuEventQuery.argtypes = [pointer]
    return library


def _error_name(library: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(name))
    return f"{(name.value or b'unknown').decode()} ({code})"
