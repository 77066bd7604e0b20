"""Where everything of a plan lies on the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmbuild.engine.launch_plan import LaunchPlan, Place


@dataclass(frozen=True)
class Addresses:
    """Addresses by name, for each kind of place."""

    buffers: Mapping[str, int]
    counters: Mapping[str, int]
    inputs: Mapping[str, int]
    weights: Mapping[str, int]
    pools: Mapping[str, int]
    state: Mapping[str, int]

    @staticmethod
    def of(
        plan: LaunchPlan,
        *,
        arena: int,
        counters: int = 0,
        inputs: Mapping[str, int],
        weights: Mapping[str, int],
        pools: Mapping[str, int],
        state: Mapping[str, int] | None = None,
    ) -> Addresses:
        """arena, counters: addresses of the allocations; those of what lies in them follow."""
        buffers = {buffer.name: arena + buffer.offset for buffer in plan.buffers}
        of_counters = {name: counters + offset for name, offset in plan.counter_offsets.items()}
        return Addresses(buffers, of_counters, inputs, weights, pools, state or {})

    def __call__(self, place: Place) -> int:
        """Return the address of a place."""
        match place.kind:
            case "buffer":
                start = self.buffers[place.name]
            case "counter":
                start = self.counters[place.name]
            case "input":
                start = self.inputs[place.name]
            case "weight":
                start = self.weights[place.name]
            case "pool":
                start = self.pools[place.name]
            case "state":
                start = self.state[place.name]
        return start + place.offset
