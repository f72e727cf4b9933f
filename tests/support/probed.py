"""Answers that a process finds by trying, and keeps: whether memory can be shared and moved.

Imported before processes are forked, which have the answers then: each would take a fifth of a second.
"""

from __future__ import annotations

from infinity.storage.arena import can_remap, can_share

can_remap()
for huge_pages in (True, False):
    can_share(huge_pages=huge_pages)
