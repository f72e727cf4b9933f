// One element at a time: the same operations as the vector lanes, and what their remainders use.
//
// Every operation is one IEEE operation, rounded once. The files that include this are compiled
// with -ffp-contract=off: a fused multiply-add happens where it is written and nowhere else.
#pragma once

#include <cstdint>

#include "dynamic_map.h"

namespace infinity::update {
namespace {

// The builtins, not the functions of the standard library: an inline function that two instruction
// sets share is one function to the linker.
inline std::uint32_t float_to_bits(float value) { return __builtin_bit_cast(std::uint32_t, value); }
inline float bits_to_float(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

struct ScalarLanes {
  using Float = float;
  static constexpr std::size_t kCount = 1;

  static Float broadcast(float value) { return value; }
  static Float load(const float* source) { return *source; }
  // `kPastCaches`: to aligned memory that is not read soon; see sweep.h.
  template <bool kPastCaches = false>
  static void store(float* target, Float value) {
    *target = value;
  }

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
  static Float keep_infinity(Float a, Float b) { return float_to_bits(a) == 0x7F800000U ? a : b; }

  static Float load_bf16(const std::uint16_t* source) {
    return bits_to_float(static_cast<std::uint32_t>(*source) << 16);
  }
  // docs/formats/split_master.md: master = (weight << 16) + residual, modulo 2^32.
  static Float load_split(const std::uint16_t* weight, const std::int16_t* residual) {
    const auto low = static_cast<std::uint32_t>(static_cast<std::int32_t>(*residual));
    return bits_to_float((static_cast<std::uint32_t>(*weight) << 16) + low);
  }
  template <bool kPastCaches>
  static void store_split(std::uint16_t* weight, std::int16_t* residual, Float master) {
    // A NaN must stay one in the weight: one quiet NaN stands for all.
    const auto bits = master != master ? 0xFFC00000U : float_to_bits(master);
    *weight = static_cast<std::uint16_t>((bits + 0x8000U) >> 16);
    *residual = static_cast<std::int16_t>(static_cast<std::uint16_t>(bits));
  }

  // The value of one code: dynamic_map.h.
  template <bool kIsSigned>
  static Float decode(const std::uint8_t* code) {
    const int place = kIsSigned ? *code - kSignedZero : *code;
    const int q = kIsSigned ? 4 * (place < 0 ? -place : place) + 2 : 2 * place + 3;
    const int e = 31 - __builtin_clz(static_cast<unsigned>(q));
    const float mantissa = static_cast<float>(q) / static_cast<float>(1 << e);
    const float value = (9.0F * mantissa - 8.0F) * kDynamicMap<kIsSigned>.units[e - 1];
    const float bounded = value < 1.0F ? value : 1.0F;
    return place < 0 ? -bounded : bounded;
  }
  // The code of a number whose magnitude is at most about 1. Squares have no sign: it is dropped.
  template <bool kIsSigned>
  static void encode(std::uint8_t* code, Float a) {
    constexpr const DynamicMap& map = kDynamicMap<kIsSigned>;
    const float magnitude = a < 0.0F ? -a : a;
    std::size_t segment = 0;
    while (magnitude >= map.next_thresholds[segment]) ++segment;
    const float found = __builtin_fmaf(magnitude, map.slopes[segment], map.offsets[segment]);
    const float last = map.lasts[segment];
    const auto place = static_cast<int>(found < last ? found : last);
    const int above = a < 0.0F ? kSignedZero - place : kSignedZero + place;
    const int result = kIsSigned ? (above < 0 ? 0 : above) : place;
    *code = static_cast<std::uint8_t>(result);
  }

  // The bits of a magnitude.
  using Magnitude = std::uint32_t;
  static Magnitude no_magnitude() { return 0; }
  static Magnitude max_magnitude(Magnitude largest, Float a) {
    const std::uint32_t bits = float_to_bits(a) & 0x7FFFFFFFU;
    return bits > largest ? bits : largest;
  }
  static std::uint32_t largest(Magnitude bits) { return bits; }
};

}  // namespace
}  // namespace infinity::update
