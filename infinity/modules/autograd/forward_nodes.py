"""The autograd nodes that a forward has made, and hooks before them.

Note [Nodes of a forward]
  Autograd numbers nodes as it makes them. The nodes of a forward are the nodes that its outputs
  reach and that are numbered at or above the number at its start. Each of these nodes gets a hook
  that acquires the units before the node runs. A backward may therefore enter the module in the
  middle, through a tensor that the module has saved (a router's auxiliary loss). The *exits* are
  the nodes with no next node in the set. Every node of the forward lies before an exit, so the
  module's backward is over when all exits have run, whatever else uses the same tensors.
  No node is inserted between the module and its inputs: an alias or an identity function would
  change the order in which gradients are summed, which changes bits, and would make some in-place
  operations illegal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import Node

from infinity.modules.autograd.outputs import tensors_in

# AccumulateGrad nodes have the highest possible number.
ACCUMULATES = 2**64 - 1

# Nodes whose backward reads gradients and sizes alone (tools/autograd/derivatives.yaml).
_READS_NOTHING = frozenset(
    f"{name}Backward{number}"
    for name, number in (
        ("Add", 0), ("Alias", 0), ("AsStrided", 0), ("Cat", 0), ("Clone", 0), ("Expand", 0),
        ("Neg", 0), ("Permute", 0), ("ReshapeAlias", 0), ("Select", 0), ("Slice", 0),
        ("Split", 0), ("Squeeze", 0), ("Squeeze", 1), ("Stack", 0), ("Sub", 0), ("T", 0),
        ("ToCopy", 0), ("Transpose", 0), ("Transpose", 1), ("Unbind", 0), ("UnsafeView", 0),
        ("Unsqueeze", 0), ("View", 0),
    )
)  # fmt: skip


@dataclass(eq=False, slots=True)
class ForwardNodes:
    """The nodes that one forward has made. `exits` have no next node among them, `inner` have.
    `guarded`: the inner nodes that find the units in use when they run."""

    inner: list[Node]
    exits: list[Node]
    guarded: list[Node]


def nodes_since(first: int, output: Any) -> ForwardNodes:
    """Returns the nodes numbered `first` or higher that the tensors of `output` reach."""
    found = ForwardNodes([], [], [])
    outputs = (output,) if isinstance(output, torch.Tensor) else tensors_in(output)
    entries = set()
    for tensor in outputs:
        node = tensor.grad_fn
        if node is not None and first <= node._sequence_nr() < ACCUMULATES:
            entries.add(node)
    # Not by `walk`: every call of a hooked module comes here.
    waiting, seen = list(entries), set(entries)
    while waiting:
        node = waiting.pop()
        is_exit, has_parameter = True, False
        for following, _ in node.next_functions:
            if following is None:
                continue
            number = following._sequence_nr()
            if number >= ACCUMULATES:
                has_parameter = True
            elif number >= first:
                is_exit = False
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        if is_exit:
            found.exits.append(node)
            continue
        found.inner.append(node)
        # A gradient of a parameter comes after the update that the last step has left pending.
        if has_parameter or node in entries or node.name() not in _READS_NOTHING:
            found.guarded.append(node)
    return found


def behind(node: Node) -> list[Node]:
    """Returns the nodes that get a gradient from this one."""
    return [following for following, _ in node.next_functions if following is not None]


def walk(
    starts: Iterable[Node], enter: Callable[[Node], Iterable[Node]] = behind
) -> Iterator[Node]:
    """Yields `starts` and what they lead to, each node once. `enter` returns the nodes to go on to
    from one."""
    waiting = list(dict.fromkeys(starts))
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following in enter(node):
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def nodes_behind(nodes: set[Node]) -> set[Node]:
    """Returns the nodes that receive gradients from these, without the nodes of parameters."""
    following = {found for node in nodes for found in behind(node)} - nodes
    return {node for node in following if node._sequence_nr() < ACCUMULATES}


# Lends its table of hooks to nodes, and has none at other times.
_lender = torch.empty(0, device="cpu")
_lending = threading.Lock()


def call_before_each(nodes: Iterable[Node], hook: Callable[[torch.Tensor | None], None]) -> None:
    """Has `hook` called with a gradient before each of these nodes runs, and before a node that a
    backward for chosen inputs reaches and does not run.

    `Node.register_prehook` makes a table of hooks, and a handle to remove this one, for each node:
    that takes longer than all calls of the hook. Here the nodes share one table.
    """
    with _lending:
        _lender._backward_hooks = {0: hook}
        for node in nodes:
            node._register_hook_dict(_lender)
        _lender._backward_hooks = None
