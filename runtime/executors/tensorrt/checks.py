"""Whether this machine can run an engine of tensorrt-rtx or tensorrt, asked before the engine is read."""

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
    """Bytes of one slot, or block, of one layer's keys or values."""
    form = cache.layers[layer]
    width = form.head_dim if name == "keys" else form.v_head_dim
    return form.num_kv_heads * cache.block_size * width * ITEM_BYTES[cache.dtype]


def block_bytes(cache: KVCacheSection) -> int:
    """Bytes of one slot, or block, of all layers."""
    return sum(slot_bytes(cache, layer, name) for layer in range(len(cache.layers)) for name in ("keys", "values"))


def check_memory(device: Device, slots: int, cache: KVCacheSection, engine_bytes: int) -> None:
    """Raise EngineError when the engine and its slots do not fit into the free memory of the GPU."""
    a_slot = block_bytes(cache)
    free, _ = device.memory()
    need = engine_bytes + slots * a_slot
    if need > free:
        raise EngineError(
            f"the engine needs {human_size(need)} of GPU memory: {human_size(engine_bytes)} for itself and "
            f"{human_size(a_slot)} for each of {slots} sequences; {human_size(free)} are free",
            where=f"GPU {device.ordinal}, {device.name}",
            hint="load it with fewer kv_cache_blocks, or convert the model again with a smaller --max-seq-len",
        )


# ------------------------------------------------------------------------------------------------ the full TensorRT
def check_same_gpu(device: Device, section: Mapping[str, Any], engine: Path) -> None:
    """
    Raises:
        EngineError: The engine was built on another kind of GPU.
    """
    if device.sm != section["sm"]:
        raise EngineError(
            f"the engine was built on a GPU of SM {section['sm']} ({section['gpu']}); this one is SM {device.sm}",
            where=f"{engine}, GPU {device.ordinal}: {device.name}",
            hint="convert the model again on this machine: TensorRT builds for the GPU that is there",
        )


def check_plugin(section: Mapping[str, Any], engine: Path) -> None:
    """
    Raises:
        EngineError: The engine holds plugins of another version. Those whose kernels it stores have none.
    """
    if section["plugin"] is None:
        return
    from llmbuild.plugins.tensorrt import fields, program

    here = {"fields": fields.VERSION, "program": program.VERSION}
    if section["plugin"] != here:
        was, now = (f"{each['fields']}.{each['program']}" for each in (section["plugin"], here))
        raise EngineError(
            f"the engine's plugin PagedAttention has version {was}; this llmbuild runs version {now}",
            where=str(engine),
            hint="convert the model again with this version of llmbuild",
        )


def check_activations(device: Device, size: int) -> None:
    """Raise EngineError when activations do not fit beside the engine."""
    free, _ = device.memory()
    if size > free:
        raise EngineError(
            f"activations need {human_size(size)} of GPU memory; {human_size(free)} are free beside the engine",
            where=f"GPU {device.ordinal}, {device.name}",
            hint="end other processes that use the GPU, or convert the model again with a smaller --max-num-tokens",
        )


def check_engine_fits(device: Device, engine_bytes: int) -> None:
    """Raise EngineError when the engine, weights included, is larger than the free memory of the GPU."""
    free, _ = device.memory()
    if engine_bytes > free:
        raise EngineError(
            f"the engine needs {human_size(engine_bytes)} of GPU memory for itself; {human_size(free)} are free",
            where=f"GPU {device.ordinal}, {device.name}",
            hint="end other processes that use the GPU, or convert the model again with --quant int4-wo-g128",
        )


def choose_blocks(
    device: Device, cache: KVCacheSection, *, asked: int | None, fraction: float, most: int, sequence: int, used: int
) -> int:
    """Return the number of KV blocks.

    Args:
        asked: What the user asks for, or None for what fits.
        fraction: Of the free memory that `used` leaves, in (0, 1].
        most: Blocks that can ever be of use, or that the engine takes.
        sequence: Blocks of the longest sequence.
        used: Bytes that will be allocated besides.

    Raises:
        ConfigError: More is asked for than the engine takes.
        EngineError: What is asked for, or one sequence, does not fit.
    """
    if asked is not None and asked > most:
        raise ConfigError(
            f"{asked} KV blocks are asked for, and the engine takes {most}",
            where="kv_cache_blocks",
            hint=f"give at most {most}",
        )
    block = block_bytes(cache)
    left = max(device.memory()[0] - used, 0)
    fitting = left // block if asked is not None else min(most, int(left * fraction) // block)
    need = sequence if asked is None else asked
    if need > fitting:
        raise EngineError(
            f"{need} KV blocks need {human_size(need * block)} of GPU memory; {human_size(left)} are free",
            where=f"GPU {device.ordinal}, {device.name}",
            hint="end other processes that use the GPU, or convert the model again with a smaller --max-seq-len",
        )
    return fitting if asked is None else asked
