#include "order.h"

#include <algorithm>
#include <tuple>

namespace infinity::io {

std::vector<FileRange> covered_ranges(std::span<const Segment> segments) {
  std::vector<FileRange> ranges;
  ranges.reserve(segments.size());
  for (const Segment& segment : segments) {
    ranges.push_back({segment.file, segment.offset_nbytes, segment.offset_nbytes + segment.nbytes});
  }
  std::sort(ranges.begin(), ranges.end(), [](const FileRange& a, const FileRange& b) {
    return std::tie(a.file, a.start_nbytes) < std::tie(b.file, b.start_nbytes);
  });
  std::vector<FileRange> merged;
  for (const FileRange& range : ranges) {
    if (!merged.empty() && merged.back().file == range.file &&
        range.start_nbytes <= merged.back().end_nbytes) {
      merged.back().end_nbytes = std::max(merged.back().end_nbytes, range.end_nbytes);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

bool overlap(std::span<const FileRange> one, std::span<const FileRange> other) noexcept {
  auto a = one.begin();
  auto b = other.begin();
  while (a != one.end() && b != other.end()) {
    if (a->file < b->file || (a->file == b->file && a->end_nbytes <= b->start_nbytes)) {
      ++a;
    } else if (b->file < a->file || b->end_nbytes <= a->start_nbytes) {
      ++b;
    } else {
      return true;
    }
  }
  return false;
}

bool conflict(const Part& one, const Part& other) noexcept {
  if (one.operation == Operation::kRead && other.operation == Operation::kRead) return false;
  return overlap(one.ranges, other.ranges);
}

}  // namespace infinity::io
