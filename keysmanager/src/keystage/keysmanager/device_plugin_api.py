"""Messages and methods of the kubelet's device plugin protocol, v1beta1, made at run time.

The protocol is small and frozen (`k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto`): its messages are
stated here as data, from which protobuf builds the classes, so that neither generated code nor a compiler
is needed. Used by `device_plugin_server` and `device_plugin`; it holds no behaviour.

Wire types are those of the .proto file: field numbers must not change. Left out are requests that a plugin
without preferred allocation and without pre-start is never sent.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

VERSION = "v1beta1"
REGISTRATION = f"{VERSION}.Registration"
DEVICE_PLUGIN = f"{VERSION}.DevicePlugin"
KUBELET_SOCKET = "kubelet.sock"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"

_TYPE = descriptor_pb2.FieldDescriptorProto
_SCALARS = {"string": _TYPE.TYPE_STRING, "bool": _TYPE.TYPE_BOOL, "int64": _TYPE.TYPE_INT64}
_MAP = "map<string, string>"

_MESSAGES: dict[str, tuple[str, ...]] = {
    "Empty": (),
    "DevicePluginOptions": ("bool pre_start_required = 1", "bool get_preferred_allocation_available = 2"),
    "RegisterRequest": (
        "string version = 1",
        "string endpoint = 2",
        "string resource_name = 3",
        "DevicePluginOptions options = 4",
    ),
    "NUMANode": ("int64 ID = 1",),
    "TopologyInfo": ("repeated NUMANode nodes = 1",),
    "Device": ("string ID = 1", "string health = 2", "TopologyInfo topology = 3"),
    "ListAndWatchResponse": ("repeated Device devices = 1",),
    "ContainerAllocateRequest": ("repeated string devices_ids = 1",),
    "AllocateRequest": ("repeated ContainerAllocateRequest container_requests = 1",),
    "Mount": ("string container_path = 1", "string host_path = 2", "bool read_only = 3"),
    "DeviceSpec": ("string container_path = 1", "string host_path = 2", "string permissions = 3"),
    "CDIDevice": ("string name = 1",),
    "ContainerAllocateResponse": (
        f"{_MAP} envs = 1",
        "repeated Mount mounts = 2",
        "repeated DeviceSpec devices = 3",
        f"{_MAP} annotations = 4",
        "repeated CDIDevice cdi_devices = 5",
    ),
    "AllocateResponse": ("repeated ContainerAllocateResponse container_responses = 1",),
}


def _field(message: descriptor_pb2.DescriptorProto, line: str) -> None:
    """Adds the field that a line of the .proto file states."""
    declared, _, number = line.rpartition(" = ")
    kind, _, name = declared.rpartition(" ")
    field = message.field.add(name=name, number=int(number), label=_TYPE.LABEL_OPTIONAL)
    if kind == _MAP:  # on the wire: repeated messages of a key and a value
        entry = message.nested_type.add(name=name.capitalize() + "Entry")
        entry.options.map_entry = True
        _field(entry, "string key = 1")
        _field(entry, "string value = 2")
        field.label = _TYPE.LABEL_REPEATED
        field.type = _TYPE.TYPE_MESSAGE
        field.type_name = f".{VERSION}.{message.name}.{entry.name}"
        return
    if kind.startswith("repeated "):
        field.label = _TYPE.LABEL_REPEATED
        kind = kind.removeprefix("repeated ")
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _TYPE.TYPE_MESSAGE
        field.type_name = f".{VERSION}.{kind}"


def _classes() -> dict[str, Any]:
    """One class per message, in a pool of their own: another library's copy does no harm."""
    file = descriptor_pb2.FileDescriptorProto(name="api.proto", package=VERSION, syntax="proto3")
    for name, lines in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in lines:
            _field(message, line)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{VERSION}.{name}"))
        for name in _MESSAGES
    }


_BUILT = _classes()
Empty: Any = _BUILT["Empty"]
DevicePluginOptions: Any = _BUILT["DevicePluginOptions"]
RegisterRequest: Any = _BUILT["RegisterRequest"]
NUMANode: Any = _BUILT["NUMANode"]
TopologyInfo: Any = _BUILT["TopologyInfo"]
Device: Any = _BUILT["Device"]
ListAndWatchResponse: Any = _BUILT["ListAndWatchResponse"]
ContainerAllocateRequest: Any = _BUILT["ContainerAllocateRequest"]
AllocateRequest: Any = _BUILT["AllocateRequest"]
DeviceSpec: Any = _BUILT["DeviceSpec"]
ContainerAllocateResponse: Any = _BUILT["ContainerAllocateResponse"]
AllocateResponse: Any = _BUILT["AllocateResponse"]


def encode(message: Any) -> bytes:
    """Bytes of a message on the wire."""
    encoded: bytes = message.SerializeToString()
    return encoded
