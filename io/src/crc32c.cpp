#include "infinity_io/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "crc32c_kernels.h"

namespace infinity::io {

namespace {

constexpr std::size_t kNumSlices = 8;

using SliceTables = std::array<std::array<std::uint32_t, 256>, kNumSlices>;

// Table 0 moves the checksum over one byte; table n over a byte and n bytes of zeros after it.
constexpr SliceTables make_tables() {
  SliceTables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kCrc32cPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < kNumSlices; ++slice) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = before >> 8 ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr SliceTables kTables = make_tables();

// Eight bytes at a time: M. E. Kounavis and F. L. Berry, "Novel Table Lookup-Based Algorithms for
// High-Performance CRC Generation", IEEE Transactions on Computers 57 (2008).
void crc32c_by_table(const unsigned char* pages, std::size_t num_pages,
                     std::uint32_t* checksums) noexcept {
  for (std::size_t page = 0; page < num_pages; ++page) {
    std::uint32_t crc = 0xFFFFFFFF;
    const unsigned char* end = pages + kChecksumPageNbytes;
    for (; pages != end; pages += kNumSlices) {
      std::uint32_t next = 0;
      for (std::size_t at = 0; at < kNumSlices; ++at) {
        const std::uint32_t mixed = at < 4 ? crc >> 8 * at : 0;
        next ^= kTables[kNumSlices - 1 - at][(mixed ^ pages[at]) & 0xFF];
      }
      crc = next;
    }
    checksums[page] = ~crc;
  }
}

struct Found {
  std::array<Crc32cKernel, 5> kernels;
  std::size_t count = 0;

  void add(bool can_run, const Crc32cKernel& kernel) noexcept {
    if (can_run) kernels[count++] = kernel;
  }
};

Found find_kernels() noexcept {
  Found found;
#if defined(__x86_64__)
  // The compiler's library also asks whether the operating system saves the registers.
  __builtin_cpu_init();
  const bool has_sse42 = __builtin_cpu_supports("sse4.2");
  const bool has_pclmul = has_sse42 && __builtin_cpu_supports("pclmul");
  const bool has_vpclmul = has_pclmul && __builtin_cpu_supports("vpclmulqdq");
  const bool has_avx2 = __builtin_cpu_supports("avx2");
  const bool has_avx512 = __builtin_cpu_supports("avx512f");
  found.add(has_vpclmul && has_avx512, {"vpclmul", &crc32c_by_vpclmul});
  found.add(has_vpclmul && has_avx2, {"vpclmul256", &crc32c_by_vpclmul256});
  found.add(has_pclmul, {"pclmul", &crc32c_by_pclmul});
  found.add(has_sse42, {"sse4.2", &crc32c_by_sse42});
#elif defined(__aarch64__)
  constexpr unsigned long kHasCrc32 = 1UL << 7;  // HWCAP_CRC32 of asm/hwcap.h
  found.add((getauxval(AT_HWCAP) & kHasCrc32) != 0, {"armv8", &crc32c_by_armv8});
#endif
  found.add(true, {"table", &crc32c_by_table});
  return found;
}

}  // namespace

std::span<const Crc32cKernel> crc32c_kernels() noexcept {
  static const Found found = find_kernels();
  return {found.kernels.data(), found.count};
}

void crc32c_pages(const void* pages, std::size_t num_pages, std::uint32_t* checksums) noexcept {
  crc32c_kernels().front().run(static_cast<const unsigned char*>(pages), num_pages, checksums);
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
