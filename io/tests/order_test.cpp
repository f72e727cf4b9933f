#include "order.h"

#include <random>
#include <set>

#include "check.h"

namespace order_test {

using namespace infinity::io;

namespace {

Part part_of(Operation operation, const std::vector<Segment>& segments) {
  Part part;
  part.operation = operation;
  part.ranges = covered_ranges(segments);
  return part;
}

}  // namespace

TEST(RangesAreSortedAndNeighboursMerged) {
  const std::vector<Segment> segments = {
      {1, 100, 0, 50}, {0, 200, 0, 10}, {1, 0, 0, 100}, {1, 160, 0, 1}, {1, 20, 0, 10}};
  const std::vector<FileRange> ranges = covered_ranges(segments);
  CHECK(ranges.size() == 3);
  CHECK(ranges[0].file == 0 && ranges[0].start_nbytes == 200 && ranges[0].end_nbytes == 210);
  CHECK(ranges[1].file == 1 && ranges[1].start_nbytes == 0 && ranges[1].end_nbytes == 150);
  CHECK(ranges[2].start_nbytes == 160);
}

TEST(OverlapAgreesWithComparingEveryByte) {
  std::mt19937 random(1);
  const auto draw = [&random](std::uint64_t count) { return random() % count; };
  std::size_t num_overlaps = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<Segment> sides[2];
    std::set<std::pair<int, std::uint64_t>> bytes[2];
    for (std::size_t side = 0; side < 2; ++side) {
      for (std::uint64_t count = draw(4); count > 0; --count) {
        const Segment segment{static_cast<std::int32_t>(draw(2)), draw(25), 0, 1 + draw(6)};
        sides[side].push_back(segment);
        for (std::uint64_t at = 0; at < segment.nbytes; ++at) {
          bytes[side].emplace(segment.file, segment.offset_nbytes + at);
        }
      }
    }
    bool expected = false;
    for (const auto& byte : bytes[0]) expected |= bytes[1].contains(byte);
    num_overlaps += expected ? 1 : 0;
    CHECK(overlap(covered_ranges(sides[0]), covered_ranges(sides[1])) == expected);
    CHECK(overlap(covered_ranges(sides[1]), covered_ranges(sides[0])) == expected);
  }
  CHECK(num_overlaps > 200 && num_overlaps < 1800);
}

TEST(ReadsDoNotConflictWithReads) {
  const Part read = part_of(Operation::kRead, {{0, 0, 0, 100}});
  const Part write = part_of(Operation::kWrite, {{0, 50, 0, 100}});
  const Part beside = part_of(Operation::kWrite, {{0, 150, 0, 100}});
  const Part other_file = part_of(Operation::kWrite, {{1, 50, 0, 100}});
  CHECK(!conflict(read, read));
  CHECK(conflict(read, write) && conflict(write, read) && conflict(write, write));
  CHECK(!conflict(write, beside) && !conflict(write, other_file));
}

}  // namespace order_test
