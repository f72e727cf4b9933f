// Sixteen elements at a time: AVX-512 F, BW, DQ and VL. See lanes_scalar.h.
#pragma once

#include <immintrin.h>

#include "span.h"

namespace infinity::update {
namespace {

struct Avx512Lanes {
  using Float = __m512;
  using Count = std::uint64_t;
  static constexpr std::size_t kCount = 16;

  static Float broadcast(float value) { return _mm512_set1_ps(value); }
  static Float load(const float* source) { return _mm512_loadu_ps(source); }
  static void store(float* target, Float value) { _mm512_storeu_ps(target, value); }

  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
  static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float div(Float a, Float b) { return _mm512_div_ps(a, b); }
  static Float sqrt(Float a) { return _mm512_sqrt_ps(a); }
  static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
  static Float signed_by(Float a, Float magnitude) {
    const Float zero = _mm512_setzero_ps();
    const __mmask16 is_above = _mm512_cmp_ps_mask(a, zero, _CMP_GT_OQ);
    const __mmask16 is_below = _mm512_cmp_ps_mask(a, zero, _CMP_LT_OQ);
    const Float minus = _mm512_xor_ps(magnitude, _mm512_set1_ps(-0.0F));
    return _mm512_mask_mov_ps(_mm512_maskz_mov_ps(is_above, magnitude), is_below, minus);
  }

  // `a` where it is positive infinity, else `b`.
  static Float keep_infinity(Float a, Float b) {
    const Float infinity = _mm512_castsi512_ps(_mm512_set1_epi32(0x7F800000));
    return _mm512_mask_mov_ps(b, _mm512_cmp_ps_mask(a, infinity, _CMP_EQ_OQ), a);
  }

  static Float load_bf16(const std::uint16_t* source) {
    return _mm512_castsi512_ps(widen_high(source));
  }
  static Float load_split(const std::uint16_t* weight, const std::int16_t* residual) {
    const __m512i low = _mm512_cvtepi16_epi32(_mm256_loadu_si256(
        static_cast<const __m256i*>(static_cast<const void*>(residual))));
    return _mm512_castsi512_ps(_mm512_add_epi32(widen_high(weight), low));
  }
  static void store_split(std::uint16_t* weight, std::int16_t* residual, Float master) {
    const __mmask16 is_nan = _mm512_cmp_ps_mask(master, master, _CMP_UNORD_Q);
    const __m512i bits = _mm512_mask_mov_epi32(_mm512_castps_si512(master), is_nan,
                                               _mm512_set1_epi32(0x7FC00000));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
    store_halves(weight, _mm512_srli_epi32(rounded, 16));
    store_halves(residual, bits);
  }

  static Count no_count() { return 0; }
  static Count count_nonfinite(Count count, Float a) {
    constexpr int kNonFinite = 0x81 | 0x18;  // Quiet and signalling NaN, both infinities.
    const auto mask = static_cast<unsigned>(_mm512_fpclass_ps_mask(a, kNonFinite));
    return count + static_cast<Count>(__builtin_popcount(mask));
  }
  static std::uint64_t total(Count count) { return count; }

 private:
  static __m512i widen_high(const std::uint16_t* source) {
    const __m256i halves = _mm256_loadu_si256(
        static_cast<const __m256i*>(static_cast<const void*>(source)));
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
  }
  static void store_halves(void* target, __m512i lanes) {  // The low half of each lane.
    _mm256_storeu_si256(static_cast<__m256i*>(target), _mm512_cvtepi32_epi16(lanes));
  }
};

}  // namespace
}  // namespace infinity::update
