// Compiled for its instruction set when CMake could; called only where update/dispatch.cpp found it.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

#include <immintrin.h>

#include "rows.h"

namespace infinity::decode {
namespace {

// 32 codes at a time; the table stays in a register.
struct Avx512Lookup : ScalarLookup {
  template <class Out>
  static std::size_t pairs(const Table<Out>& table, const std::uint8_t* codes, std::size_t numel,
                           bool is_high_first, typename Out::Bits* out) noexcept {
    const __m512i elements = _mm512_load_si512(table.elements);
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
    return done + ScalarLookup::pairs<Out>(table, codes + done / 2, numel - done, is_high_first,
                                           out + done);
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
