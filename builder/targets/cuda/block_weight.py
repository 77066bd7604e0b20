"""A block-quantized weight in a plan: its values packed as the kernels read them, its scales as they are."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, fx

from llmbuild.builder.ir import Map
from llmbuild.builder.passes.edit import size
from llmbuild.builder.targets.cuda.lowered import Lowered, dtype_name
from llmbuild.builder.targets.cuda.views import NoRule
from llmbuild.engine.launch_plan import Place
from llmbuild.plugins.kernels.block_layout import BlockShape, pack_blocks


class BlockWeight:
    """A weight in blocks: how it is held (`shape`), and where its packed values lie (`values`).

    Raises:
        NoRule: There are no kernels for such blocks.
    """

    def __init__(
        self,
        lowered: Lowered,
        node: fx.Node,
        q: fx.Node,
        scale: fx.Node,
        offset: fx.Node | None,
        form: tuple[int, int, int],
    ) -> None:
        bits, block_size, zero = form
        try:
            self.shape = BlockShape(bits, block_size, zero, offset is not None, dtype_name(scale.meta["val"].dtype))
        except ValueError as error:
            raise NoRule(node, str(error)) from None
        n, k = (int(dim) for dim in size(q))
        packed = (n, self.shape.units(k) * 16)
        source = lowered.program.weights[q.name]
        label = f"packed values of {q.name}"
        self.values: Place = lowered.weight(
            f"{q.name}_packed", Map(source, partial(pack, bits), packed, torch.uint8, label, rowwise=True)
        )


def pack(bits: int, q: Tensor) -> Tensor:
    return torch.from_numpy(pack_blocks(q.numpy(), bits))
