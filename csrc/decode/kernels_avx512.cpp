// Compiled for its instruction set when CMake could; called only where update/dispatch.cpp found
// it.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

#include "rows.h"

namespace infinity::decode {
namespace {

// As Bf16::bits.
inline __m256i bf16_bits(__m512 numbers) noexcept {
  const __m512i from = _mm512_castps_si512(numbers);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(from, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(from, _mm512_add_epi32(last, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_srli_epi32(sum, 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7FC0)));
}

// 32 codes at a time, or 16; the 16 elements stay in a register.
struct Avx512Lookup {
  template <class Product, class Out>
  static __m512i elements_of(const float* values, float scale) noexcept {
    if constexpr (std::is_same_v<Out, Bf16> && kIsRoundedOnce<Product, Out>) {
      const __m512 products = _mm512_mul_ps(_mm512_loadu_ps(values), _mm512_set1_ps(scale));
      return _mm512_castsi256_si512(bf16_bits(products));
    } else {
      const Table<Product, Out> table(values, scale);
      if constexpr (sizeof table == 64 && sizeof(typename Out::Bits) == 4) {
        return _mm512_load_si512(table.elements);
      } else {
        return _mm512_castsi256_si512(
            _mm256_load_si256(reinterpret_cast<const __m256i*>(table.elements)));
      }
    }
  }

  template <class Product, class Out>
  static std::size_t pairs(const float* values, float scale, const std::uint8_t* codes,
                           std::size_t numel, bool is_high_first,
                           typename Out::Bits* out) noexcept {
    const __m512i elements = elements_of<Product, Out>(values, scale);
    const __m128i nibble = _mm_set1_epi8(15);
    std::size_t done = 0;
    for (; done + 32 <= numel; done += 32) {
      const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + done / 2));
      const __m128i low_codes = _mm_and_si128(packed, nibble);
      const __m128i high_codes = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
      const __m128i even = is_high_first ? high_codes : low_codes;
      const __m128i odd = is_high_first ? low_codes : high_codes;
      const __m128i first = _mm_unpacklo_epi8(even, odd);
      const __m128i second = _mm_unpackhi_epi8(even, odd);
      if constexpr (sizeof(typename Out::Bits) == 2) {
        const __m512i index = _mm512_cvtepu8_epi16(_mm256_set_m128i(second, first));
        _mm512_storeu_si512(out + done, _mm512_permutexvar_epi16(index, elements));
      } else {
        const __m512i low = _mm512_permutexvar_epi32(_mm512_cvtepu8_epi32(first), elements);
        const __m512i high = _mm512_permutexvar_epi32(_mm512_cvtepu8_epi32(second), elements);
        _mm512_storeu_si512(out + done, low);
        _mm512_storeu_si512(out + done + 16, high);
      }
    }
    if (done + 16 <= numel) {
      const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + done / 2));
      const __m128i low_codes = _mm_and_si128(packed, nibble);
      const __m128i high_codes = _mm_and_si128(_mm_srli_epi16(packed, 4), nibble);
      const __m128i first = is_high_first ? _mm_unpacklo_epi8(high_codes, low_codes)
                                          : _mm_unpacklo_epi8(low_codes, high_codes);
      if constexpr (sizeof(typename Out::Bits) == 2) {
        const __m256i index = _mm256_cvtepu8_epi16(first);
        _mm256_storeu_si256(
            reinterpret_cast<__m256i*>(out + done),
            _mm256_permutexvar_epi16(index, _mm512_castsi512_si256(elements)));
      } else {
        _mm512_storeu_si512(out + done,
                            _mm512_permutexvar_epi32(_mm512_cvtepu8_epi32(first), elements));
      }
      done += 16;
    }
    if (done == numel) return done;
    return done + ScalarLookup::pairs<Product, Out>(values, scale, codes + done / 2, numel - done,
                                                    is_high_first, out + done);
  }
};

}  // namespace

KernelTable avx512_kernels() noexcept { return table_of<Avx512Lookup>(); }

}  // namespace infinity::decode

#else

#include "kernels.h"

namespace infinity::decode {

KernelTable avx512_kernels() noexcept { return {}; }

}  // namespace infinity::decode

#endif
