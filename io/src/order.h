// Which parts must wait for each other. Pure functions.
//
// Two parts conflict when they have a byte of a file in common and one of them writes. The later
// one then waits for the earlier, so that a read sees what was submitted before it and of two
// writes the later one stays. Parts without a conflict go in any order.
#pragma once

#include <span>
#include <vector>

#include "queued_request.h"

namespace infinity::io {

// What the segments cover: sorted by file and offset, neighbours and overlaps merged.
[[nodiscard]] std::vector<FileRange> covered_ranges(std::span<const Segment> segments);

[[nodiscard]] bool overlap(std::span<const FileRange> one,
                           std::span<const FileRange> other) noexcept;

[[nodiscard]] bool conflict(const Part& one, const Part& other) noexcept;

}  // namespace infinity::io
