// Four elements in a vector: AArch64 Advanced SIMD, which every such processor has. See
// lanes_scalar.h.
#pragma once

#include <arm_neon.h>

#include "lanes_pair.h"
#include "lanes_scalar.h"

namespace infinity::update {
namespace {

// One vector. Its split weights are stored by pairs (lanes_pair.h).
struct NeonVector {
  using Float = float32x4_t;
  static constexpr std::size_t kCount = 4;

  static Float broadcast(float value) { return vdupq_n_f32(value); }
  static Float load(const float* source) { return vld1q_f32(source); }
  template <bool kPastCaches = false>  // There is no NEON machine here to measure such stores on.
  static void store(float* target, Float value) {
    vst1q_f32(target, value);
  }

  static Float add(Float a, Float b) { return vaddq_f32(a, b); }
  static Float sub(Float a, Float b) { return vsubq_f32(a, b); }
  static Float mul(Float a, Float b) { return vmulq_f32(a, b); }
  static Float div(Float a, Float b) { return vdivq_f32(a, b); }
  static Float sqrt(Float a) { return vsqrtq_f32(a); }
  static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
  static Float signed_by(Float a, Float magnitude) {
    const Float zero = vdupq_n_f32(0.0F);
    const Float above = vbslq_f32(vcgtq_f32(a, zero), magnitude, zero);
    return vbslq_f32(vcltq_f32(a, zero), vnegq_f32(magnitude), above);
  }

  // `a` where it is positive infinity, else `b`.
  static Float keep_infinity(Float a, Float b) {
    const Float infinity = vreinterpretq_f32_u32(vdupq_n_u32(0x7F800000U));
    return vbslq_f32(vceqq_f32(a, infinity), a, b);
  }

  static Float load_bf16(const std::uint16_t* source) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(source), 16));
  }
  static Float load_split(const std::uint16_t* weight, const std::int16_t* residual) {
    const uint32x4_t low = vreinterpretq_u32_s32(vmovl_s16(vld1_s16(residual)));
    return vreinterpretq_f32_u32(vaddq_u32(vshll_n_u16(vld1_u16(weight), 16), low));
  }
  template <bool kPastCaches>
  static void store_split(std::uint16_t* weight, std::int16_t* residual, Float first,
                          Float second) {
    const uint32x4_t half = vdupq_n_u32(0x8000U);
    const uint32x4_t bits[2] = {without_payload(first), without_payload(second)};
    vst1q_u16(weight, vcombine_u16(vshrn_n_u32(vaddq_u32(bits[0], half), 16),
                                   vshrn_n_u32(vaddq_u32(bits[1], half), 16)));
    vst1q_s16(residual,
              vreinterpretq_s16_u16(vcombine_u16(vmovn_u32(bits[0]), vmovn_u32(bits[1]))));
  }

  // Codes go one by one: there is no NEON machine here to write better for.
  template <bool kIsSigned>
  static Float decode(const std::uint8_t* codes) {
    float values[kCount];
    for (std::size_t i = 0; i < kCount; ++i) values[i] = ScalarLanes::decode<kIsSigned>(codes + i);
    return vld1q_f32(values);
  }
  template <bool kIsSigned>
  static void encode(std::uint8_t* codes, Float a) {
    float values[kCount];
    vst1q_f32(values, a);
    for (std::size_t i = 0; i < kCount; ++i) ScalarLanes::encode<kIsSigned>(codes + i, values[i]);
  }

  using Magnitude = uint32x4_t;
  static Magnitude no_magnitude() { return vdupq_n_u32(0); }
  static Magnitude max_magnitude(Magnitude largest, Float a) {
    return vmaxq_u32(largest, vandq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(0x7FFFFFFFU)));
  }
  static std::uint32_t largest(Magnitude bits) { return vmaxvq_u32(bits); }

 private:
  static uint32x4_t without_payload(Float a) {  // One quiet NaN for all.
    return vbslq_u32(vceqq_f32(a, a), vreinterpretq_u32_f32(a), vdupq_n_u32(0xFFC00000U));
  }
};

}  // namespace
}  // namespace infinity::update
