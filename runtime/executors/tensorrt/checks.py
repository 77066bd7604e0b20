"""Whether this machine can run an engine of tensorrt-rtx, asked before the engine is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmbuild.engine.launch_plan import ITEM_BYTES
from llmbuild.errors import ConfigError, EngineError
from llmbuild.units import human_size

if TYPE_CHECKING:
    from llmbuild.engine.manifest import KVCacheSection
    from llmbuild.runtime.executors.cuda.driver import Device


def check_gpu(device: Device, section: Mapping[str, Any], engine: Path) -> None:
    """
    Args:
        section: Of the manifest's target.

    Raises:
        EngineError: The engine holds no code for the GPU, or TensorRT-RTX never does.
    """
    if device.sm in section["sms"]:
        return
    held = ", ".join(map(str, section["sms"]))
    where = f"{engine}, GPU {device.ordinal}: {device.name}"
    if device.sm not in section["known_sms"]:
        raise EngineError(
            f"TensorRT-RTX does not run on GPUs of SM {device.sm}; the engine was built for SM {held}",
            where=where,
            hint=f"convert the model again with --target cuda --sm {device.sm}",
        )
    raise EngineError(
        f"the engine holds no code for this GPU (SM {device.sm}); it was built for SM {held}",
        where=where,
        hint=f"convert the model again with --sm {','.join(map(str, sorted({*section['sms'], device.sm})))}",
    )


def check_slots(asked: int | None, built: int) -> int:
    """Return the number of slots.

    Raises:
        ConfigError: More than sequences can run at once.
    """
    if asked is not None and asked > built:
        raise ConfigError(
            f"{asked} KV blocks are asked for, but a block of this engine is a whole sequence, and {built} can run",
            where="kv_cache_blocks",
            hint=f"give at most {built}, or convert the model again with a larger --max-batch-size",
        )
    return built if asked is None else asked


def slot_bytes(cache: KVCacheSection, layer: int, name: str) -> int:
    """Bytes of one slot of one layer's keys or values."""
    form = cache.layers[layer]
    width = form.head_dim if name == "keys" else form.v_head_dim
    return form.num_kv_heads * cache.block_size * width * ITEM_BYTES[cache.dtype]


def check_memory(device: Device, slots: int, cache: KVCacheSection, engine_bytes: int) -> None:
    """Raise EngineError when the engine and its slots do not fit into the free memory of the GPU."""
    a_slot = sum(slot_bytes(cache, layer, name) for layer in range(len(cache.layers)) for name in ("keys", "values"))
    free, _ = device.memory()
    need = engine_bytes + slots * a_slot
    if need > free:
        raise EngineError(
            f"the engine needs {human_size(need)} of GPU memory: {human_size(engine_bytes)} for itself and "
            f"{human_size(a_slot)} for each of {slots} sequences; {human_size(free)} are free",
            where=f"GPU {device.ordinal}, {device.name}",
            hint="load it with fewer kv_cache_blocks, or convert the model again with a smaller --max-seq-len",
        )
