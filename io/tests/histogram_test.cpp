#include "infinity_io/histogram.h"

#include "check.h"

namespace histogram_test {

using namespace infinity::io;
using namespace std::chrono_literals;

namespace {

// The documented start of a bucket, worked out another way.
double start_ns(std::size_t bucket) {
  double start = 16384;
  for (std::size_t octave = 0; octave < (bucket - 1) / 4; ++octave) start *= 2;
  return start * (1 + static_cast<double>((bucket - 1) % 4) / 4);
}

}  // namespace

TEST(EveryBucketStartsWhereItSays) {
  for (std::size_t bucket = 1; bucket < Histogram::kNumBuckets; ++bucket) {
    const auto start = std::chrono::nanoseconds(static_cast<std::int64_t>(start_ns(bucket)));
    CHECK(Histogram::bucket_of(start) == bucket);
    CHECK(Histogram::bucket_of(start - 1ns) == bucket - 1);
  }
}

TEST(ExtremesFallIntoTheOuterBuckets) {
  CHECK(Histogram::bucket_of(0ns) == 0);
  CHECK(Histogram::bucket_of(-5ns) == 0);
  CHECK(Histogram::bucket_of(std::chrono::hours(1000)) == Histogram::kNumBuckets - 1);
}

TEST(HistogramsAdd) {
  Histogram one, other;
  one.add(1ms);
  other.add(1ms);
  other.add(1s);
  one += other;
  CHECK(one.counts[Histogram::bucket_of(1ms)] == 2);
  CHECK(one.counts[Histogram::bucket_of(1s)] == 1);
}

}  // namespace histogram_test
