// Eight elements at a time: AVX2 and FMA (2013 and later). See lanes_scalar.h.
#pragma once

#include <immintrin.h>

#include "span.h"

namespace infinity::update {
namespace {

struct Avx2Lanes {
  using Float = __m256;
  using Count = __m256i;  // 32 bits per lane: a call counts fewer than 2^31 elements per lane.
  static constexpr std::size_t kCount = 8;

  static Float broadcast(float value) { return _mm256_set1_ps(value); }
  static Float load(const float* source) { return _mm256_loadu_ps(source); }
  static void store(float* target, Float value) { _mm256_storeu_ps(target, value); }

  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm256_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm256_div_ps(a, b); }
  static Float sqrt(Float a) { return _mm256_sqrt_ps(a); }
  static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
  static Float signed_by(Float a, Float magnitude) {
    const Float zero = _mm256_setzero_ps();
    const Float above = _mm256_and_ps(_mm256_cmp_ps(a, zero, _CMP_GT_OQ), magnitude);
    const Float minus = _mm256_xor_ps(magnitude, _mm256_set1_ps(-0.0F));
    return _mm256_or_ps(above, _mm256_and_ps(_mm256_cmp_ps(a, zero, _CMP_LT_OQ), minus));
  }

  // `a` where it is positive infinity, else `b`.
  static Float keep_infinity(Float a, Float b) {
    const Float infinity = _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000));
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(a, infinity, _CMP_EQ_OQ));
  }

  static Float load_bf16(const std::uint16_t* source) {
    return _mm256_castsi256_ps(widen_high(source));
  }
  static Float load_split(const std::uint16_t* weight, const std::int16_t* residual) {
    const __m256i low = _mm256_cvtepi16_epi32(load_halves(residual));
    return _mm256_castsi256_ps(_mm256_add_epi32(widen_high(weight), low));
  }
  static void store_split(std::uint16_t* weight, std::int16_t* residual, Float master) {
    const Float is_nan = _mm256_cmp_ps(master, master, _CMP_UNORD_Q);
    const Float nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    const __m256i bits = _mm256_castps_si256(_mm256_blendv_ps(master, nan, is_nan));
    const __m256i half = _mm256_set1_epi32(0x8000);
    store_halves(weight, _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16));
    store_halves(residual, _mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF)));
  }

  static Count no_count() { return _mm256_setzero_si256(); }
  static Count count_nonfinite(Count count, Float a) {
    const __m256i exponent = _mm256_set1_epi32(0x7F800000);
    const __m256i masked = _mm256_and_si256(_mm256_castps_si256(a), exponent);
    return _mm256_sub_epi32(count, _mm256_cmpeq_epi32(masked, exponent));
  }
  static std::uint64_t total(Count count) {
    alignas(32) std::uint32_t lanes[kCount];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), count);
    std::uint64_t sum = 0;
    for (const std::uint32_t lane : lanes) sum += lane;
    return sum;
  }

 private:
  static __m128i load_halves(const void* source) {
    return _mm_loadu_si128(static_cast<const __m128i*>(source));
  }
  static __m256i widen_high(const std::uint16_t* source) {
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(source)), 16);
  }
  // The low half of each lane; the high half must be zero.
  static void store_halves(void* target, __m256i lanes) {
    const __m256i packed = _mm256_packus_epi32(lanes, lanes);  // Within each 128 bits.
    const __m256i ordered = _mm256_permute4x64_epi64(packed, 0b1000);
    _mm_storeu_si128(static_cast<__m128i*>(target), _mm256_castsi256_si128(ordered));
  }
};

}  // namespace
}  // namespace infinity::update
