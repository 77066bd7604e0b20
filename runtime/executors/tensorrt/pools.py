"""The KV cache of a TensorRT engine: a pool of keys and one of values for each layer, bound by address.

A pool goes in and comes out at one address: the plugin refuses anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmbuild.runtime.executors.cuda.driver import Device
from llmbuild.runtime.executors.tensorrt.checks import slot_bytes

if TYPE_CHECKING:
    from llmbuild.engine.manifest import KVCacheSection


class Pools:
    """Args:
    blocks: In each pool.

    shapes: [slots, heads, width] of each input. addresses: of inputs and outputs.
    """

    def __init__(self, device: Device, cache: KVCacheSection, blocks: int, stream: Any) -> None:
        self._device = device
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        for index, layer in enumerate(cache.layers):
            for name, width in (("keys", layer.head_dim), ("values", layer.v_head_dim)):
                size = blocks * slot_bytes(cache, index, name)
                address = device.allocate(size)
                device.fill(address, 0, size, stream)  # a weight of 0 times a NaN would be one
                self.shapes[f"{name}.{index}"] = (blocks * cache.block_size, layer.num_kv_heads, width)
                self.addresses[f"{name}.{index}"] = self.addresses[f"{name}.{index}.out"] = address

    def free(self) -> None:
        for name in self.shapes:
            self._device.free(self.addresses[name])
