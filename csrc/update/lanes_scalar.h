// One element at a time: the same operations as the vector lanes, and what their remainders use.
//
// Every operation is one IEEE operation, rounded once. The files that include this are compiled
// with -ffp-contract=off: a fused multiply-add happens where it is written and nowhere else.
#pragma once

#include <cstdint>

#include "span.h"

namespace infinity::update {
namespace {

// The builtins, not the functions of the standard library: an inline function that two instruction
// sets share is one function to the linker.
inline std::uint32_t float_to_bits(float value) { return __builtin_bit_cast(std::uint32_t, value); }
inline float bits_to_float(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

struct ScalarLanes {
  using Float = float;
  using Count = std::uint64_t;
  static constexpr std::size_t kCount = 1;

  static Float broadcast(float value) { return value; }
  static Float load(const float* source) { return *source; }
  static void store(float* target, Float value) { *target = value; }

  static Float add(Float a, Float b) { return a + b; }
  static Float sub(Float a, Float b) { return a - b; }
  static Float mul(Float a, Float b) { return a * b; }
  static Float div(Float a, Float b) { return a / b; }
  static Float sqrt(Float a) { return __builtin_sqrtf(a); }
  static Float fma(Float a, Float b, Float c) { return __builtin_fmaf(a, b, c); }  // a * b + c
  // `magnitude` with the sign of a; zero for zero and for NaN.
  static Float signed_by(Float a, Float magnitude) {
    return a > 0.0F ? magnitude : a < 0.0F ? -magnitude : 0.0F;
  }

  // `a` where it is positive infinity, else `b`.
  static Float keep_infinity(Float a, Float b) {
    return float_to_bits(a) == 0x7F800000U ? a : b;
  }

  static Float load_bf16(const std::uint16_t* source) {
    return bits_to_float(static_cast<std::uint32_t>(*source) << 16);
  }
  // docs/formats/split_master.md: master = (weight << 16) + residual, modulo 2^32.
  static Float load_split(const std::uint16_t* weight, const std::int16_t* residual) {
    const auto low = static_cast<std::uint32_t>(static_cast<std::int32_t>(*residual));
    return bits_to_float((static_cast<std::uint32_t>(*weight) << 16) + low);
  }
  static void store_split(std::uint16_t* weight, std::int16_t* residual, Float master) {
    // A NaN must stay one in the weight: one quiet NaN stands for all.
    const auto bits = master != master ? 0xFFC00000U : float_to_bits(master);
    *weight = static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
    *residual = static_cast<std::int16_t>(static_cast<std::uint16_t>(bits));
  }

  static Count no_count() { return 0; }
  static Count count_nonfinite(Count count, Float a) {
    constexpr std::uint32_t kExponent = 0x7F800000U;
    return count + ((float_to_bits(a) & kExponent) == kExponent ? 1U : 0U);
  }
  static std::uint64_t total(Count count) { return count; }
};

}  // namespace
}  // namespace infinity::update
