// Sixteen elements in a vector: AVX-512 F, BW, DQ and VL. See lanes_scalar.h.
#pragma once

#include <immintrin.h>

#include "dynamic_map.h"
#include "lanes_pair.h"

namespace infinity::update {
namespace {

// Which of the 64 halves of two vectors: every second one, from `start`.
struct Halves {
  alignas(64) std::uint16_t indexes[32];

  explicit constexpr Halves(unsigned start) : indexes() {
    for (unsigned i = 0; i < 32; ++i) indexes[i] = static_cast<std::uint16_t>(2 * i + start);
  }
};
inline constexpr Halves kLowHalves(0);
inline constexpr Halves kHighHalves(1);

// One vector. Its split weights are stored by pairs (lanes_pair.h).
struct Avx512Vector {
  using Float = __m512;
  static constexpr std::size_t kCount = 16;

  static Float broadcast(float value) { return _mm512_set1_ps(value); }
  static Float load(const float* source) { return _mm512_loadu_ps(source); }
  template <bool kPastCaches = false>
  static void store(float* target, Float value) {
    if constexpr (kPastCaches) {
      _mm512_stream_ps(target, value);
    } else {
      _mm512_storeu_ps(target, value);
    }
  }

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
    const __m512i low = _mm512_cvtepi16_epi32(
        _mm256_loadu_si256(static_cast<const __m256i*>(static_cast<const void*>(residual))));
    return _mm512_castsi512_ps(_mm512_add_epi32(widen_high(weight), low));
  }
  template <bool kPastCaches>
  static void store_split(std::uint16_t* weight, std::int16_t* residual, Float first,
                          Float second) {
    const __m512i bits[2] = {without_payload(first), without_payload(second)};
    const __m512i half = _mm512_set1_epi32(0x8000);
    store_halves<kPastCaches>(weight, pick(kHighHalves, _mm512_add_epi32(bits[0], half),
                                           _mm512_add_epi32(bits[1], half)));
    store_halves<kPastCaches>(residual, pick(kLowHalves, bits[0], bits[1]));
  }

  template <bool kIsSigned>
  static Float decode(const std::uint8_t* codes) {
    const Float code = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(
        _mm_loadu_si128(static_cast<const __m128i*>(static_cast<const void*>(codes)))));
    const Float place = kIsSigned ? _mm512_sub_ps(code, _mm512_set1_ps(kSignedZero)) : code;
    const Float q = kIsSigned
                        ? fma(_mm512_abs_ps(place), _mm512_set1_ps(4.0F), _mm512_set1_ps(2.0F))
                        : fma(place, _mm512_set1_ps(2.0F), _mm512_set1_ps(3.0F));
    const Float mantissa = _mm512_getmant_ps(q, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
    const Float whole = fma(mantissa, _mm512_set1_ps(9.0F), _mm512_set1_ps(-8.0F));
    // The low four bits of the biased exponent are e - 1.
    const __m512i exponent = _mm512_srli_epi32(_mm512_castps_si512(q), 23);
    const Float unit = lookup(kDynamicMap<kIsSigned>.units, exponent);
    const Float value = _mm512_min_ps(_mm512_mul_ps(whole, unit), _mm512_set1_ps(1.0F));
    return kIsSigned ? with_sign_of(place, value) : value;
  }
  template <bool kIsSigned>
  static void encode(std::uint8_t* codes, Float a) {
    constexpr const DynamicMap& map = kDynamicMap<kIsSigned>;
    const Float magnitude = _mm512_abs_ps(a);
    const Float bounded = _mm512_max_ps(magnitude, _mm512_set1_ps(kLeastBinade));
    const __m512i binade = _mm512_srli_epi32(_mm512_castps_si512(bounded), 23);
    const Float threshold =
        _mm512_permutex2var_ps(_mm512_load_ps(map.binade_thresholds), binade,
                               _mm512_load_ps(map.binade_thresholds + kNumBinades / 2));
    const __m512i below =
        _mm512_permutex2var_epi32(_mm512_load_si512(map.binade_segments), binade,
                                  _mm512_load_si512(map.binade_segments + kNumBinades / 2));
    const __mmask16 is_next = _mm512_cmp_ps_mask(magnitude, threshold, _CMP_GE_OQ);
    const __m512i segment = _mm512_mask_add_epi32(below, is_next, below, _mm512_set1_epi32(1));
    const Float found =
        _mm512_fmadd_ps(magnitude, lookup(map.slopes, segment), lookup(map.offsets, segment));
    const Float whole = _mm512_min_ps(found, lookup(map.lasts, segment));
    // Rounded toward zero, which is down for the magnitude.
    __m512i place = _mm512_cvttps_epi32(kIsSigned ? with_sign_of(a, whole) : whole);
    if constexpr (kIsSigned) {
      place = _mm512_max_epi32(_mm512_add_epi32(place, _mm512_set1_epi32(kSignedZero)),
                               _mm512_setzero_si512());
    }
    _mm_storeu_si128(static_cast<__m128i*>(static_cast<void*>(codes)), _mm512_cvtepi32_epi8(place));
  }

  using Magnitude = __m512i;
  static Magnitude no_magnitude() { return _mm512_setzero_si512(); }
  static Magnitude max_magnitude(Magnitude largest, Float a) {
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7FFFFFFF));
    return _mm512_max_epi32(largest, bits);
  }
  static std::uint32_t largest(Magnitude bits) {
    return static_cast<std::uint32_t>(_mm512_reduce_max_epi32(bits));
  }

 private:
  // `magnitude`, which has no sign, with that of `a`.
  static Float with_sign_of(Float a, Float magnitude) {
    constexpr int kOrWithAnd = 0xF8;  // first | (second & third)
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(_mm512_castps_si512(magnitude), _mm512_castps_si512(a),
                                  _mm512_castps_si512(_mm512_set1_ps(-0.0F)), kOrWithAnd));
  }
  static Float lookup(const float* table, __m512i index) {
    return _mm512_permutexvar_ps(index, _mm512_load_ps(table));
  }
  template <bool kPastCaches>
  static void store_halves(void* target, __m512i halves) {
    if constexpr (kPastCaches) {
      _mm512_stream_si512(static_cast<__m512i*>(target), halves);
    } else {
      _mm512_storeu_si512(target, halves);
    }
  }
  static __m512i widen_high(const std::uint16_t* source) {
    const __m256i halves =
        _mm256_loadu_si256(static_cast<const __m256i*>(static_cast<const void*>(source)));
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
  }
  // One quiet NaN for all, which this instruction can only make negative.
  static __m512i without_payload(Float a) {
    constexpr int kNanToDefault = 0x33;  // Quiet and signalling NaN; all else stays as it is.
    return _mm512_castps_si512(_mm512_fixupimm_ps(a, a, _mm512_set1_epi32(kNanToDefault), 0));
  }
  // 32 halves of the 64 in two vectors.
  static __m512i pick(const Halves& halves, __m512i first, __m512i second) {
    return _mm512_permutex2var_epi16(first, _mm512_load_si512(halves.indexes), second);
  }
};

}  // namespace
}  // namespace infinity::update
