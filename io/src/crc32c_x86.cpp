// CRC32C by instructions of x86-64 processors.
//
// Note [Folding]
//   Carry-less multiplication moves 128 bits of a message over a distance of D bits without a
//   remainder being taken: x = hi * x^64 + lo is congruent, modulo the polynomial P, to
//   hi * (x^(D+64) mod P) + lo * (x^D mod P) times x^D. So a page is folded, 64, 32 or 16 bytes at
//   a time, into one vector that has the page's checksum; the crc32 instruction takes the remainder
//   of its last 16 bytes. V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using
//   PCLMULQDQ Instruction", Intel white paper 323102 (2009). CRC32C is bit-reflected, and the
//   product of two reflected 64-bit numbers is one bit short of a reflected 128-bit one: the
//   constants are shifted by that bit, and their exponents are D + 32 and D - 32.
//
// Note [Several pages]
//   Steps of one page wait for each other; those of different pages do not. Four pages keep the
//   multiplier busy. Eight take a fifth less time where the bytes come from the shared cache: the
//   memory has more streams to read ahead.
#if defined(__x86_64__)

#include <array>
#include <cstring>

#include <immintrin.h>

#include "crc32c_kernels.h"
#include "infinity_io/crc32c.h"

// Inlined into the kernels, which have the same target: a call would cost more than the work.
#define INF_INLINE_FOR(isa) __attribute__((target(isa), always_inline)) inline
#define INF_TARGET(isa) __attribute__((target(isa)))

namespace infinity::io {

namespace {

// x^exponent mod P as a factor of a carry-less multiplication: reflected, see Note [Folding].
constexpr std::uint64_t power_of_x(unsigned exponent) {
  std::uint32_t power = 0x80000000;  // x^0
  for (; exponent > 0; --exponent) power = power >> 1 ^ (power & 1 ? kCrc32cPolynomial : 0);
  return std::uint64_t{power} << 1;
}

// By what 16 bytes are multiplied to move over so many bytes.
struct Fold {
  std::uint64_t low;
  std::uint64_t high;
};

constexpr Fold fold_over(unsigned nbytes) {
  return {power_of_x(8 * nbytes + 32), power_of_x(8 * nbytes - 32)};
}

static_assert(fold_over(16).low == 0xF20C0DFE && fold_over(16).high == 0x14CD00BD6,
              "the constants that are published for CRC32C");

#define INF_SSE42 "sse4.2,crc32"

INF_INLINE_FOR(INF_SSE42) std::uint64_t word_at(const unsigned char* bytes) noexcept {
  std::uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// `kCount` pages by the crc32 instruction, which takes three cycles and may start every cycle.
template <std::size_t kCount>
INF_TARGET(INF_SSE42)
void instruct(const unsigned char* pages, std::uint32_t* checksums) noexcept {
  std::array<std::uint64_t, kCount> crcs;
  crcs.fill(0xFFFFFFFF);
  for (std::size_t at = 0; at < kChecksumPageNbytes; at += sizeof(std::uint64_t)) {
    for (std::size_t page = 0; page < kCount; ++page) {
      crcs[page] = _mm_crc32_u64(crcs[page], word_at(pages + page * kChecksumPageNbytes + at));
    }
  }
  for (std::size_t page = 0; page < kCount; ++page) {
    checksums[page] = ~static_cast<std::uint32_t>(crcs[page]);
  }
}

#define INF_PCLMUL "sse4.2,crc32,pclmul"

INF_INLINE_FOR(INF_PCLMUL) __m128i load16(const unsigned char* bytes) noexcept {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

INF_INLINE_FOR(INF_PCLMUL) __m128i fold16(__m128i sum, __m128i fold, __m128i next) noexcept {
  const __m128i low = _mm_clmulepi64_si128(sum, fold, 0x00);
  const __m128i high = _mm_clmulepi64_si128(sum, fold, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// The checksum of a page that was folded into its last 16 bytes.
INF_INLINE_FOR(INF_PCLMUL) std::uint32_t checksum_of(__m128i sum) noexcept {
  std::uint64_t crc = 0;
  crc = _mm_crc32_u64(crc, static_cast<std::uint64_t>(_mm_cvtsi128_si64(sum)));
  crc = _mm_crc32_u64(crc, static_cast<std::uint64_t>(_mm_extract_epi64(sum, 1)));
  return ~static_cast<std::uint32_t>(crc);
}

constexpr std::size_t kInstructed = 3;
constexpr std::size_t kFolded = 4;

// Seven pages: three by the crc32 instruction, four by folding 16 bytes at a time.
INF_TARGET(INF_PCLMUL)
void instruct_and_fold(const unsigned char* pages, std::uint32_t* checksums) noexcept {
  const unsigned char* folded = pages + kInstructed * kChecksumPageNbytes;
  constexpr Fold kOver16 = fold_over(16);
  const __m128i fold =
      _mm_set_epi64x(static_cast<long long>(kOver16.high), static_cast<long long>(kOver16.low));
  std::array<std::uint64_t, kInstructed> crcs;
  crcs.fill(0xFFFFFFFF);
  __m128i sums[kFolded];
  const __m128i start = _mm_cvtsi32_si128(-1);
  for (std::size_t at = 0; at < kChecksumPageNbytes; at += 16) {
    for (std::size_t page = 0; page < kInstructed; ++page) {
      const unsigned char* bytes = pages + page * kChecksumPageNbytes + at;
      crcs[page] = _mm_crc32_u64(_mm_crc32_u64(crcs[page], word_at(bytes)), word_at(bytes + 8));
    }
    for (std::size_t page = 0; page < kFolded; ++page) {
      const __m128i next = load16(folded + page * kChecksumPageNbytes + at);
      sums[page] = at == 0 ? _mm_xor_si128(next, start) : fold16(sums[page], fold, next);
    }
  }
  for (std::size_t page = 0; page < kInstructed; ++page) {
    checksums[page] = ~static_cast<std::uint32_t>(crcs[page]);
  }
  for (std::size_t page = 0; page < kFolded; ++page) {
    checksums[kInstructed + page] = checksum_of(sums[page]);
  }
}

#define INF_VPCLMUL256 "sse4.2,crc32,pclmul,avx2,vpclmulqdq"

INF_INLINE_FOR(INF_VPCLMUL256) __m256i load32(const unsigned char* bytes) noexcept {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

INF_INLINE_FOR(INF_VPCLMUL256) __m256i fold32(__m256i sum, __m256i fold, __m256i next) noexcept {
  const __m256i low = _mm256_clmulepi64_epi128(sum, fold, 0x00);
  const __m256i high = _mm256_clmulepi64_epi128(sum, fold, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

// Moves the first of the two parts onto the last.
INF_INLINE_FOR(INF_VPCLMUL256) __m128i join(__m256i sum) noexcept {
  constexpr Fold kOver16 = fold_over(16);
  const __m128i fold =
      _mm_set_epi64x(static_cast<long long>(kOver16.high), static_cast<long long>(kOver16.low));
  return fold16(_mm256_castsi256_si128(sum), fold, _mm256_extracti128_si256(sum, 1));
}

constexpr std::size_t kInstructedBeside32 = 3;
constexpr std::size_t kFolded32 = 4;

// Pages by the crc32 instruction, and others by folding 32 bytes at a time. Measured on Zen 3, of a
// shared cache and of memory: 1.5 and 1.25 times the pages a second of `instruct_and_fold`.
INF_TARGET(INF_VPCLMUL256)
void instruct_and_fold32(const unsigned char* pages, std::uint32_t* checksums) noexcept {
  const unsigned char* folded = pages + kInstructedBeside32 * kChecksumPageNbytes;
  constexpr Fold kOver32 = fold_over(32);
  const auto low = static_cast<long long>(kOver32.low), high = static_cast<long long>(kOver32.high);
  const __m256i fold = _mm256_set_epi64x(high, low, high, low);
  std::array<std::uint64_t, kInstructedBeside32> crcs;
  crcs.fill(0xFFFFFFFF);
  __m256i sums[kFolded32];
  const __m256i start = _mm256_set_epi64x(0, 0, 0, 0xFFFFFFFF);
  for (std::size_t at = 0; at < kChecksumPageNbytes; at += 32) {
    for (std::size_t page = 0; page < kInstructedBeside32; ++page) {
      const unsigned char* bytes = pages + page * kChecksumPageNbytes + at;
      for (std::size_t word = 0; word < 32; word += sizeof(std::uint64_t)) {
        crcs[page] = _mm_crc32_u64(crcs[page], word_at(bytes + word));
      }
    }
    for (std::size_t page = 0; page < kFolded32; ++page) {
      const __m256i next = load32(folded + page * kChecksumPageNbytes + at);
      sums[page] = at == 0 ? _mm256_xor_si256(next, start) : fold32(sums[page], fold, next);
    }
  }
  for (std::size_t page = 0; page < kInstructedBeside32; ++page) {
    checksums[page] = ~static_cast<std::uint32_t>(crcs[page]);
  }
  for (std::size_t page = 0; page < kFolded32; ++page) {
    checksums[kInstructedBeside32 + page] = checksum_of(join(sums[page]));
  }
}

#define INF_VPCLMUL "sse4.2,crc32,pclmul,avx512f,vpclmulqdq"

INF_INLINE_FOR(INF_VPCLMUL) __m512i load64(const unsigned char* bytes) noexcept {
  return _mm512_loadu_si512(bytes);
}

INF_INLINE_FOR(INF_VPCLMUL) __m512i fold64(__m512i sum, __m512i fold, __m512i next) noexcept {
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(sum, fold, 0x00),
                                   _mm512_clmulepi64_epi128(sum, fold, 0x11), next, kXorOfThree);
}

INF_INLINE_FOR(INF_VPCLMUL) __m512i four_folds(Fold a, Fold b, Fold c, Fold d) noexcept {
  return _mm512_set_epi64(static_cast<long long>(d.high), static_cast<long long>(d.low),
                          static_cast<long long>(c.high), static_cast<long long>(c.low),
                          static_cast<long long>(b.high), static_cast<long long>(b.low),
                          static_cast<long long>(a.high), static_cast<long long>(a.low));
}

// Moves the first three of the four parts onto the last, which stays where it is.
INF_INLINE_FOR(INF_VPCLMUL) __m128i join(__m512i sum) noexcept {
  constexpr Fold kOver48 = fold_over(48), kOver32 = fold_over(32), kOver16 = fold_over(16);
  const __m512i moved = fold64(sum, four_folds(kOver48, kOver32, kOver16, Fold{0, 0}),
                               _mm512_maskz_mov_epi64(0xC0, sum));
  alignas(64) __m128i parts[4];
  _mm512_store_si512(parts, moved);
  return _mm_xor_si128(_mm_xor_si128(parts[0], parts[1]), _mm_xor_si128(parts[2], parts[3]));
}

// `kCount` pages, 64 bytes of each at a time.
template <std::size_t kCount>
INF_TARGET(INF_VPCLMUL)
void fold_pages(const unsigned char* pages, std::uint32_t* checksums) noexcept {
  constexpr Fold kOver64 = fold_over(64);
  const __m512i fold = four_folds(kOver64, kOver64, kOver64, kOver64);
  const __m512i start = _mm512_maskz_set1_epi32(1, -1);
  __m512i sums[kCount];
  for (std::size_t page = 0; page < kCount; ++page) {
    sums[page] = _mm512_xor_si512(load64(pages + page * kChecksumPageNbytes), start);
  }
  for (std::size_t at = 64; at < kChecksumPageNbytes; at += 64) {
    for (std::size_t page = 0; page < kCount; ++page) {
      sums[page] = fold64(sums[page], fold, load64(pages + page * kChecksumPageNbytes + at));
    }
  }
  for (std::size_t page = 0; page < kCount; ++page) checksums[page] = checksum_of(join(sums[page]));
}

using Run = void (*)(const unsigned char* pages, std::uint32_t* checksums) noexcept;

// All pages, `kCount` at a time, and one by one what is left.
template <std::size_t kCount>
void run_all(Run several, Run single, const unsigned char* pages, std::size_t num_pages,
             std::uint32_t* checksums) noexcept {
  std::size_t page = 0;
  for (; page + kCount <= num_pages; page += kCount) {
    several(pages + page * kChecksumPageNbytes, checksums + page);
  }
  for (; page < num_pages; ++page) single(pages + page * kChecksumPageNbytes, checksums + page);
}

// Note [Several pages]
constexpr std::size_t kInstructedAlone = 4;
constexpr std::size_t kFoldedAlone = 8;

}  // namespace

void crc32c_by_sse42(const unsigned char* pages, std::size_t num_pages,
                     std::uint32_t* checksums) noexcept {
  run_all<kInstructedAlone>(&instruct<kInstructedAlone>, &instruct<1>, pages, num_pages, checksums);
}

void crc32c_by_pclmul(const unsigned char* pages, std::size_t num_pages,
                      std::uint32_t* checksums) noexcept {
  run_all<kInstructed + kFolded>(&instruct_and_fold, &instruct<1>, pages, num_pages, checksums);
}

void crc32c_by_vpclmul256(const unsigned char* pages, std::size_t num_pages,
                          std::uint32_t* checksums) noexcept {
  run_all<kInstructedBeside32 + kFolded32>(&instruct_and_fold32, &instruct<1>, pages, num_pages,
                                           checksums);
}

void crc32c_by_vpclmul(const unsigned char* pages, std::size_t num_pages,
                       std::uint32_t* checksums) noexcept {
  run_all<kFoldedAlone>(&fold_pages<kFoldedAlone>, &fold_pages<1>, pages, num_pages, checksums);
}

}  // namespace infinity::io

#endif
