// Latencies in log-linear buckets: four per power of two, from 16 us to 128 s.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cstdint>

namespace infinity::io {

// Bucket 0 holds everything below 16.384 us. Bucket 1 + 4 * octave + quarter starts at
// 16.384 us * 2^octave * (1 + quarter / 4). The last one is open above.
struct Histogram {
  static constexpr std::size_t kNumBuckets = 94;
  static constexpr unsigned kLowestBit = 14;  // 2^14 ns = 16.384 us

  std::array<std::uint64_t, kNumBuckets> counts{};

  [[nodiscard]] static constexpr std::size_t bucket_of(std::chrono::nanoseconds latency) noexcept {
    const auto ns = static_cast<std::uint64_t>(std::max<std::int64_t>(latency.count(), 0));
    if (ns >> kLowestBit == 0) return 0;
    const auto top_bit = static_cast<unsigned>(std::bit_width(ns)) - 1;
    const std::size_t quarter = ns >> (top_bit - 2) & 3;
    return std::min(kNumBuckets - 1, 1 + 4 * std::size_t{top_bit - kLowestBit} + quarter);
  }

  void add(std::chrono::nanoseconds latency) noexcept { ++counts[bucket_of(latency)]; }

  Histogram& operator+=(const Histogram& other) noexcept {
    for (std::size_t at = 0; at < kNumBuckets; ++at) counts[at] += other.counts[at];
    return *this;
  }
};

}  // namespace infinity::io
