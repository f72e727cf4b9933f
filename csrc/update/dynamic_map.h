// The codes of the 8-bit state: one byte for a number in [-1, 1], or in [0, 1] for squares.
// docs/formats/moments_8bit.md has the format, infinity/ops/dynamic_8bit.py the same as a
// reference.
//
// Seven decades, each with twice as many values as the one below it, equally spaced; a zero; and 1.
// So a code is a small floating-point number with a decimal exponent: with q = 4 |place| + 2 where
// there is a sign and q = 2 code + 3 where there is none, and q = m 2^e with m in [1, 2), the value
// is 10^(e - 9) (9 m - 8); it is 0 where e = 1, and 1 where that would be more.
//
// Source: Dettmers, "8-bit approximations for parallelism in deep learning", 2016 (the dynamic
// type), in the form that torchao's OptimState8bit documents.
#pragma once

#include <cstddef>
#include <cstdint>

#include "span.h"

namespace infinity::update {
namespace {

inline constexpr int kNumDecades = 7;
inline constexpr int kNumSegments = kNumDecades + 2;  // Zero, the decades, one.
inline constexpr int kSignedZero = 127;               // The code of zero where there is a sign.
// No two thresholds are in one binade, so the exponent of a magnitude tells its segment or the one
// below. What is smaller than the least of these binades is taken for one of it: the threshold of
// zero decides. The low five bits of a biased exponent number the binades.
inline constexpr int kNumBinades = 32;
inline constexpr float kLeastBinade = 0x1p-31F;

// Tables that fill a vector register; entries beyond those named are zero and never used.
struct DynamicMap {
  // To decode, by e - 1: what 9 m - 8 is multiplied by.
  alignas(64) float units[16] = {};
  // To encode, by segment: where the next one starts; then the place is slope x + offset, rounded
  // down, and at most the segment's last.
  alignas(64) float next_thresholds[16] = {};
  alignas(64) float slopes[16] = {};
  alignas(64) float offsets[16] = {};
  alignas(64) float lasts[16] = {};
  // By binade: the segment at its start, and where the one above starts.
  alignas(64) std::int32_t binade_segments[kNumBinades] = {};
  alignas(64) float binade_thresholds[kNumBinades] = {};
};

constexpr double power(double base, int exponent) {
  double result = 1.0;
  for (int i = 0; i < exponent; ++i) result *= base;
  return result;
}

// Every number is the quotient of two integers, rounded to fp64 and then to fp32, as in the
// reference.
template <bool kIsSigned>
constexpr DynamicMap make_dynamic_map() {
  DynamicMap map;
  for (int e = 2; e <= 9; ++e) {
    map.units[e - 1] = static_cast<float>(1.0 / power(10.0, 9 - e));
  }
  // The values at the two ends of each segment, between which the thresholds are.
  double lowest[kNumSegments] = {}, highest[kNumSegments] = {};
  for (int s = 1; s <= kNumDecades; ++s) {
    const double count = power(2.0, kIsSigned ? s - 1 : s);
    const double whole = 20.0 * count * power(10.0, kNumDecades - s);
    lowest[s] = (2.0 * count + 9.0) / whole;
    highest[s] = (20.0 * count - 9.0) / whole;
    map.slopes[s] = static_cast<float>(count * power(10.0, kNumDecades + 1 - s) / 9.0);
    map.offsets[s] = static_cast<float>((8.0 * count - (kIsSigned ? 0.0 : 9.0)) / 9.0);
    map.lasts[s] = static_cast<float>(2.0 * count - (kIsSigned ? 1.0 : 2.0));
  }
  lowest[kNumSegments - 1] = 1.0;
  map.offsets[kNumSegments - 1] = map.lasts[kNumSegments - 1] = kIsSigned ? 128.0F : 255.0F;
  for (int s = 0; s + 1 < kNumSegments; ++s) {
    map.next_thresholds[s] = static_cast<float>((highest[s] + lowest[s + 1]) / 2.0);
  }
  map.next_thresholds[kNumSegments - 1] = __builtin_inff();
  if (!kIsSigned) {
    // No square becomes zero, because a step divides by its root: the lowest value is that of all
    // below the middle of it and its neighbour.
    map.next_thresholds[0] = 0x1p-126F;
    map.slopes[1] = static_cast<float>(1e8 / 55.0);
    map.offsets[1] = 1.0F;
  }
  double start = kLeastBinade;
  for (int binade = 0; binade < kNumBinades; ++binade, start *= 2.0) {
    int segment = 0;
    while (binade > 0 && map.next_thresholds[segment] <= start) ++segment;
    map.binade_segments[binade] = segment;
    map.binade_thresholds[binade] = map.next_thresholds[segment];
  }
  return map;
}

template <bool kIsSigned>
inline constexpr DynamicMap kDynamicMap = make_dynamic_map<kIsSigned>();

// Those that are twice as large are in another binade.
constexpr bool has_one_threshold_a_binade(const DynamicMap& map) {
  for (int s = 0; s + 1 < kNumSegments; ++s) {
    if (map.next_thresholds[s + 1] < 2.0F * map.next_thresholds[s]) return false;
  }
  return true;
}
static_assert(has_one_threshold_a_binade(kDynamicMap<true>));
static_assert(has_one_threshold_a_binade(kDynamicMap<false>));

}  // namespace
}  // namespace infinity::update
