// Compiled for its instruction set when CMake could; called only where update/dispatch.cpp found
// it.
#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

#include "rows.h"

namespace infinity::decode {
namespace {

// As Bf16::bits, in the low half of each lane.
inline __m256i bf16_bits(__m256 numbers) noexcept {
  const __m256i from = _mm256_castps_si256(numbers);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi32(from, 16), _mm256_set1_epi32(1));
  const __m256i sum = _mm256_add_epi32(from, _mm256_add_epi32(last, _mm256_set1_epi32(0x7FFF)));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(numbers, numbers, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7FC0), is_nan);
}

// 32 codes at a time, or 16: the two bytes of an element are looked up apart, and then joined.
struct Avx2Lookup {
  template <class Product, class Out>
  static __m256i elements_of(const float* values, float scale) noexcept {
    if constexpr (std::is_same_v<Out, Bf16> && kIsRoundedOnce<Product, Out>) {
      const __m256 factor = _mm256_set1_ps(scale);
      const __m256i first = bf16_bits(_mm256_mul_ps(_mm256_loadu_ps(values), factor));
      const __m256i second = bf16_bits(_mm256_mul_ps(_mm256_loadu_ps(values + 8), factor));
      return _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
    } else {
      const Table<Product, Out> table(values, scale);
      return _mm256_load_si256(reinterpret_cast<const __m256i*>(table.elements));
    }
  }

  static void store16(__m128i low, __m128i high, __m128i index, std::uint16_t* out) noexcept {
    auto* to = reinterpret_cast<__m128i*>(out);
    const __m128i lows = _mm_shuffle_epi8(low, index);
    const __m128i highs = _mm_shuffle_epi8(high, index);
    _mm_storeu_si128(to, _mm_unpacklo_epi8(lows, highs));
    _mm_storeu_si128(to + 1, _mm_unpackhi_epi8(lows, highs));
  }

  template <class Product, class Out>
  static std::size_t pairs(const float* values, float scale, const std::uint8_t* codes,
                           std::size_t numel, bool is_high_first,
                           typename Out::Bits* out) noexcept {
    std::size_t done = 0;
    if constexpr (sizeof(typename Out::Bits) == 2) {
      const __m256i elements = elements_of<Product, Out>(values, scale);
      const __m128i first = _mm256_castsi256_si128(elements);
      const __m128i second = _mm256_extracti128_si256(elements, 1);
      const __m128i byte = _mm_set1_epi16(0xFF);
      const __m128i low =
          _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte));
      const __m128i high = _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8));
      const __m128i nibble = _mm_set1_epi8(15);
      for (; done + 32 <= numel; done += 32) {
        const __m128i packed =
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + done / 2));
        const __m128i low_codes = _mm_and_si128(packed, nibble);
        const __m128i high_codes = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
        const __m128i even = is_high_first ? high_codes : low_codes;
        const __m128i odd = is_high_first ? low_codes : high_codes;
        store16(low, high, _mm_unpacklo_epi8(even, odd), out + done);
        store16(low, high, _mm_unpackhi_epi8(even, odd), out + done + 16);
      }
      if (done + 16 <= numel) {
        const __m128i packed =
            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + done / 2));
        const __m128i low_codes = _mm_and_si128(packed, nibble);
        const __m128i high_codes = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
        store16(low, high,
                is_high_first ? _mm_unpacklo_epi8(high_codes, low_codes)
                              : _mm_unpacklo_epi8(low_codes, high_codes),
                out + done);
        done += 16;
      }
    }
    if (done == numel) return done;
    return done + ScalarLookup::pairs<Product, Out>(values, scale, codes + done / 2, numel - done,
                                                    is_high_first, out + done);
  }
};

}  // namespace

KernelTable avx2_kernels() noexcept { return table_of<Avx2Lookup>(); }

}  // namespace infinity::decode

#else

#include "kernels.h"

namespace infinity::decode {

KernelTable avx2_kernels() noexcept { return {}; }

}  // namespace infinity::decode

#endif
