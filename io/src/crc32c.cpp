#include "infinity_io/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace infinity::io {

namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
    table[byte] = crc;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kTable = make_table();

#if defined(__x86_64__)

// The instruction takes three cycles and one can start every cycle: four pages keep it busy.
constexpr std::size_t kNumStreams = 4;

template <std::size_t kCount>
__attribute__((target("sse4.2"))) void crc32c_side_by_side(const unsigned char* pages,
                                                           std::uint32_t* checksums) noexcept {
  std::array<std::uint64_t, kCount> crcs;
  crcs.fill(0xFFFFFFFF);
  for (std::size_t at = 0; at < kChecksumPageNbytes; at += sizeof(std::uint64_t)) {
    for (std::size_t stream = 0; stream < kCount; ++stream) {
      std::uint64_t word;
      std::memcpy(&word, pages + stream * kChecksumPageNbytes + at, sizeof word);
      crcs[stream] = _mm_crc32_u64(crcs[stream], word);
    }
  }
  for (std::size_t stream = 0; stream < kCount; ++stream) {
    checksums[stream] = ~static_cast<std::uint32_t>(crcs[stream]);
  }
}

void crc32c_pages_by_instruction(const unsigned char* pages, std::size_t num_pages,
                                 std::uint32_t* checksums) noexcept {
  std::size_t page = 0;
  for (; page + kNumStreams <= num_pages; page += kNumStreams) {
    crc32c_side_by_side<kNumStreams>(pages + page * kChecksumPageNbytes, checksums + page);
  }
  for (; page < num_pages; ++page) {
    crc32c_side_by_side<1>(pages + page * kChecksumPageNbytes, checksums + page);
  }
}

#endif

}  // namespace

bool has_crc32c_instruction() noexcept {
#if defined(__x86_64__)
  return __builtin_cpu_supports("sse4.2");
#else
  return false;
#endif
}

void crc32c_pages_by_table(const void* pages, std::size_t num_pages,
                           std::uint32_t* checksums) noexcept {
  const auto* bytes = static_cast<const unsigned char*>(pages);
  for (std::size_t page = 0; page < num_pages; ++page) {
    std::uint32_t crc = 0xFFFFFFFF;
    for (std::size_t at = 0; at < kChecksumPageNbytes; ++at) {
      crc = crc >> 8 ^ kTable[(crc ^ *bytes++) & 0xFF];
    }
    checksums[page] = ~crc;
  }
}

void crc32c_pages(const void* pages, std::size_t num_pages, std::uint32_t* checksums) noexcept {
#if defined(__x86_64__)
  if (has_crc32c_instruction()) {
    crc32c_pages_by_instruction(static_cast<const unsigned char*>(pages), num_pages, checksums);
    return;
  }
#endif
  crc32c_pages_by_table(pages, num_pages, checksums);
}

std::size_t first_bad_page(const void* pages, std::size_t num_pages,
                           const std::uint32_t* expected) noexcept {
  constexpr std::size_t kBatch = 64;
  const auto* bytes = static_cast<const unsigned char*>(pages);
  std::uint32_t found[kBatch];
  for (std::size_t page = 0; page < num_pages; page += kBatch) {
    const std::size_t count = std::min(kBatch, num_pages - page);
    crc32c_pages(bytes + page * kChecksumPageNbytes, count, found);
    const auto bad = std::mismatch(found, found + count, expected + page).first - found;
    if (static_cast<std::size_t>(bad) != count) return page + static_cast<std::size_t>(bad);
  }
  return num_pages;
}

}  // namespace infinity::io
