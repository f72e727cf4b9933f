// Eight elements in a vector: AVX2 and FMA (2013 and later). See lanes_scalar.h.
#pragma once

#include <immintrin.h>

#include "dynamic_map.h"
#include "lanes_pair.h"

namespace infinity::update {
namespace {

// One vector. Its split weights are stored by pairs (lanes_pair.h).
struct Avx2Vector {
  using Float = __m256;
  static constexpr std::size_t kCount = 8;

  static Float broadcast(float value) { return _mm256_set1_ps(value); }
  static Float load(const float* source) { return _mm256_loadu_ps(source); }
  template <bool kPastCaches = false>
  static void store(float* target, Float value) {
    if constexpr (kPastCaches) {
      _mm256_stream_ps(target, value);
    } else {
      _mm256_storeu_ps(target, value);
    }
  }

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
  template <bool kPastCaches>
  static void store_split(std::uint16_t* weight, std::int16_t* residual, Float first,
                          Float second) {
    const __m256i bits[2] = {without_payload(first), without_payload(second)};
    const __m256i half = _mm256_set1_epi32(0x8000);
    const __m256i low = _mm256_set1_epi32(0xFFFF);
    store_halves<kPastCaches>(weight, _mm256_srli_epi32(_mm256_add_epi32(bits[0], half), 16),
                              _mm256_srli_epi32(_mm256_add_epi32(bits[1], half), 16));
    store_halves<kPastCaches>(residual, _mm256_and_si256(bits[0], low),
                              _mm256_and_si256(bits[1], low));
  }

  template <bool kIsSigned>
  static Float decode(const std::uint8_t* codes) {
    const __m256i wide = _mm256_cvtepu8_epi32(
        _mm_loadl_epi64(static_cast<const __m128i*>(static_cast<const void*>(codes))));
    const __m256i place = kIsSigned ? _mm256_sub_epi32(wide, _mm256_set1_epi32(kSignedZero)) : wide;
    const __m256i q =
        kIsSigned
            ? _mm256_add_epi32(_mm256_slli_epi32(_mm256_abs_epi32(place), 2), _mm256_set1_epi32(2))
            : _mm256_add_epi32(_mm256_slli_epi32(place, 1), _mm256_set1_epi32(3));
    const Float number = _mm256_cvtepi32_ps(q);
    const __m256i bits = _mm256_castps_si256(number);
    const __m256i mantissa = _mm256_or_si256(_mm256_and_si256(bits, _mm256_set1_epi32(0x007FFFFF)),
                                             _mm256_set1_epi32(0x3F800000));
    const Float whole =
        _mm256_fmadd_ps(_mm256_castsi256_ps(mantissa), _mm256_set1_ps(9.0F), _mm256_set1_ps(-8.0F));
    // The low four bits of the biased exponent are e - 1.
    const Float unit = lookup(kDynamicMap<kIsSigned>.units, _mm256_srli_epi32(bits, 23));
    const Float value = _mm256_min_ps(_mm256_mul_ps(whole, unit), _mm256_set1_ps(1.0F));
    if constexpr (!kIsSigned) return value;
    const Float sign = _mm256_and_ps(_mm256_castsi256_ps(place), _mm256_set1_ps(-0.0F));
    return _mm256_or_ps(value, sign);
  }
  template <bool kIsSigned>
  static void encode(std::uint8_t* codes, Float a) {
    constexpr const DynamicMap& map = kDynamicMap<kIsSigned>;
    const Float magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0F), a);
    // Counted: a table of 32 would take as long.
    __m256i segment = _mm256_setzero_si256();
    for (int s = 0; s + 1 < kNumSegments; ++s) {
      const Float threshold = _mm256_set1_ps(map.next_thresholds[s]);
      const Float is_above = _mm256_cmp_ps(magnitude, threshold, _CMP_GE_OQ);
      segment = _mm256_sub_epi32(segment, _mm256_castps_si256(is_above));
    }
    const Float found =
        _mm256_fmadd_ps(magnitude, lookup(map.slopes, segment), lookup(map.offsets, segment));
    __m256i place = _mm256_cvttps_epi32(_mm256_min_ps(found, lookup(map.lasts, segment)));
    if constexpr (kIsSigned) {
      const __m256i below = _mm256_srai_epi32(_mm256_castps_si256(a), 31);
      place = _mm256_sub_epi32(_mm256_xor_si256(place, below), below);
      place = _mm256_add_epi32(place, _mm256_set1_epi32(kSignedZero));
    }
    // Narrowed with saturation: what is below zero becomes zero.
    const __m128i halves =
        _mm_packs_epi32(_mm256_castsi256_si128(place), _mm256_extracti128_si256(place, 1));
    _mm_storel_epi64(static_cast<__m128i*>(static_cast<void*>(codes)),
                     _mm_packus_epi16(halves, halves));
  }

  using Magnitude = __m256i;
  static Magnitude no_magnitude() { return _mm256_setzero_si256(); }
  static Magnitude max_magnitude(Magnitude largest, Float a) {
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7FFFFFFF));
    return _mm256_max_epi32(largest, bits);
  }
  static std::uint32_t largest(Magnitude bits) {
    alignas(32) std::uint32_t lanes[kCount];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), bits);
    std::uint32_t found = 0;
    for (const std::uint32_t lane : lanes) found = lane > found ? lane : found;
    return found;
  }

 private:
  // One of sixteen: the two halves, chosen by the index's fourth bit.
  static Float lookup(const float* table, __m256i index) {
    const Float low = _mm256_permutevar8x32_ps(_mm256_load_ps(table), index);
    const Float high = _mm256_permutevar8x32_ps(_mm256_load_ps(table + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }
  static __m128i load_halves(const void* source) {
    return _mm_loadu_si128(static_cast<const __m128i*>(source));
  }
  static __m256i widen_high(const std::uint16_t* source) {
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves(source)), 16);
  }
  static __m256i without_payload(Float a) {  // One quiet NaN for all.
    const Float nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(0xFFC00000U)));
    const Float is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
    return _mm256_castps_si256(_mm256_blendv_ps(a, nan, is_nan));
  }
  // The low half of each lane; the high half must be zero.
  template <bool kPastCaches>
  static void store_halves(void* target, __m256i first, __m256i second) {
    const __m256i packed = _mm256_packus_epi32(first, second);  // Within each 128 bits.
    const __m256i ordered = _mm256_permute4x64_epi64(packed, 0b11'01'10'00);
    if constexpr (kPastCaches) {
      _mm256_stream_si256(static_cast<__m256i*>(target), ordered);
    } else {
      _mm256_storeu_si256(static_cast<__m256i*>(target), ordered);
    }
  }
};

}  // namespace
}  // namespace infinity::update
