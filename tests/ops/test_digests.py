"""Checksums that an update takes of the pages it writes are those of the pages."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinity.ops.dynamic_8bit import State8Bit
from infinity.ops.optimizers import update_
from infinity.ops.rules import AdamWSettings, Settings, SGDSettings
from infinity.ops.span import StateSpan
from infinity.sizes import PAGE_NBYTES
from infinity.storage.checksums import PageDigests, digest

from .state import clone, make_span

ADAMW = AdamWSettings(lr=1e-3, step=3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
SGD = SGDSettings(lr=1e-3, step=3, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False)
ITEM_NUMEL = 1 << 16  # What a thread updates at a time.


def in_pages(array: Tensor, before_numel: int) -> tuple[Tensor, int, int]:
    """The array in memory that has other bytes around it, and the address and length of the pages
    that this memory begins with."""
    offset_nbytes = before_numel * array.element_size()
    nbytes = -(-(offset_nbytes + array.nbytes) // PAGE_NBYTES) * PAGE_NBYTES
    memory = torch.full((nbytes + PAGE_NBYTES,), 7, dtype=torch.uint8)
    skipped = -memory.data_ptr() % PAGE_NBYTES
    start = skipped + offset_nbytes
    found = memory[start : start + array.nbytes].view(array.dtype)
    found.copy_(array)
    return found, memory.data_ptr() + skipped, nbytes


def placed(span: StateSpan, before_numel: int) -> tuple[StateSpan, list[tuple[int, int]]]:
    """The span with all that an update changes in pages, and these pages."""
    pages: list[tuple[int, int]] = []

    def place(array: Tensor) -> Tensor:
        found, *page_range = in_pages(array, before_numel)
        pages.append((page_range[0], page_range[1]))
        return found

    states = tuple(
        State8Bit(place(state.codes), state.scales)
        if isinstance(state, State8Bit)
        else place(state)
        for state in span.states
    )
    residual = None if span.residual is None else place(span.residual)
    return StateSpan(place(span.weight), span.gradient, states, residual), pages


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 3 * ITEM_NUMEL),
    before_numel=st.integers(0, 2048),
    rule=st.sampled_from([ADAMW, SGD]),
    kind=st.sampled_from(["fp32", "split", "8-bit"]),
    threads=st.integers(1, 3),
)
@example(numel=ITEM_NUMEL, before_numel=0, rule=ADAMW, kind="fp32", threads=1)
@example(numel=2 * ITEM_NUMEL + 8, before_numel=1, rule=ADAMW, kind="fp32", threads=2)
def test_checksums_of_an_update_are_those_of_what_it_has_written(
    numel: int, before_numel: int, rule: Settings, kind: str, threads: int
) -> None:
    made = make_span(numel, 1, rule, is_split=kind == "split", is_8bit=kind == "8-bit")
    alone = clone(made)
    span, pages = placed(made, before_numel)
    digests = [PageDigests(address, nbytes) for address, nbytes in pages]
    update_([span], rule, threads=threads, digests=digests)
    for taken, (address, nbytes) in zip(digests, pages, strict=True):
        assert taken.finish() == digest(address, nbytes)
    update_([alone], rule, threads=threads)
    assert torch.equal(alone.weight, span.weight)


def test_checksums_are_taken_when_the_pages_are_written_and_the_others_at_the_end() -> None:
    """Of two neighbours that share a page each has the other pages."""
    numel = 2 * ITEM_NUMEL
    span, [*_, (address, nbytes)] = placed(make_span(numel, 1, SGD), 0)
    middle = ITEM_NUMEL + 512
    digests = PageDigests(address, nbytes)
    for part in (slice(0, middle), slice(middle, numel)):
        states = tuple(state[part] for state in span.states if isinstance(state, Tensor))
        parts = StateSpan(span.weight[part], span.gradient[part], states)
        update_([parts], SGD, digests=[digests])
    written = digest(address, nbytes)
    span.weight.zero_()
    kept, zeros = digests.finish(), digest(address, nbytes)
    shared = middle * 4 // PAGE_NBYTES * 4
    at = slice(shared, shared + 4)
    assert kept[at] == zeros[at] != written[at]
    assert kept[: at.start] + kept[at.stop :] == written[: at.start] + written[at.stop :]
