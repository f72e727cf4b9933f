// Compiled for its instruction set when CMake could; called only where update/dispatch.cpp found it.
#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

#include "rows.h"

namespace infinity::decode {
namespace {

// 32 codes at a time: the two bytes of an element are looked up apart, and then joined.
struct Avx2Lookup : ScalarLookup {
  template <class Out>
  static std::size_t pairs(const Table<Out>& table, const std::uint8_t* codes, std::size_t numel,
                           bool is_high_first, typename Out::Bits* out) noexcept {
    std::size_t done = 0;
    if constexpr (sizeof(typename Out::Bits) == 2) {
      const auto* halves = reinterpret_cast<const __m128i*>(table.elements);
      const __m128i first = _mm_load_si128(halves);
      const __m128i second = _mm_load_si128(halves + 1);
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
        auto* to = reinterpret_cast<__m128i*>(out + done);
        const __m128i indices[] = {_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd)};
        for (const __m128i index : indices) {
          const __m128i lows = _mm_shuffle_epi8(low, index);
          const __m128i highs = _mm_shuffle_epi8(high, index);
          _mm_storeu_si128(to++, _mm_unpacklo_epi8(lows, highs));
          _mm_storeu_si128(to++, _mm_unpackhi_epi8(lows, highs));
        }
      }
    }
    return done + ScalarLookup::pairs<Out>(table, codes + done / 2, numel - done, is_high_first,
                                           out + done);
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
