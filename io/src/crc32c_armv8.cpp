// CRC32C by the instructions of ARMv8-A's CRC extension, which every processor since ARMv8.1 has.
#if defined(__aarch64__)

#include <array>
#include <cstring>

#include "crc32c_kernels.h"
#include "infinity_io/crc32c.h"

namespace infinity::io {

namespace {

// By its name in assembly: compilers disagree on how an intrinsic is enabled for one function.
inline std::uint32_t step(std::uint32_t crc, std::uint64_t word) noexcept {
  asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
  return crc;
}

// Several pages at a time hide the latency of the instruction.
template <std::size_t kCount>
void instruct(const unsigned char* pages, std::uint32_t* checksums) noexcept {
  std::array<std::uint32_t, kCount> crcs;
  crcs.fill(0xFFFFFFFF);
  for (std::size_t at = 0; at < kChecksumPageNbytes; at += sizeof(std::uint64_t)) {
    for (std::size_t page = 0; page < kCount; ++page) {
      std::uint64_t word;
      std::memcpy(&word, pages + page * kChecksumPageNbytes + at, sizeof word);
      crcs[page] = step(crcs[page], word);
    }
  }
  for (std::size_t page = 0; page < kCount; ++page) checksums[page] = ~crcs[page];
}

}  // namespace

void crc32c_by_armv8(const unsigned char* pages, std::size_t num_pages,
                     std::uint32_t* checksums) noexcept {
  constexpr std::size_t kSideBySide = 4;
  std::size_t page = 0;
  for (; page + kSideBySide <= num_pages; page += kSideBySide) {
    instruct<kSideBySide>(pages + page * kChecksumPageNbytes, checksums + page);
  }
  for (; page < num_pages; ++page) {
    instruct<1>(pages + page * kChecksumPageNbytes, checksums + page);
  }
}

}  // namespace infinity::io

#endif
