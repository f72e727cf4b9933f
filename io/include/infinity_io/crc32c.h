// CRC32C (Castagnoli, RFC 3720 appendix B.4) of pages of 4096 bytes.
//
// One checksum per page: any range of whole pages can then be checked or replaced without reading
// what is around it, and several pages are worked on at a time, which hides the latency of the
// processor's instructions without tables to combine partial results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace infinity::io {

inline constexpr std::size_t kChecksumPageNbytes = 4096;

// The checksum of each of `num_pages` pages at `pages`, which may have any alignment.
void crc32c_pages(const void* pages, std::size_t num_pages, std::uint32_t* checksums) noexcept;

// The first page whose checksum is not the expected one; `num_pages` when all are right.
[[nodiscard]] std::size_t first_bad_page(const void* pages, std::size_t num_pages,
                                         const std::uint32_t* expected) noexcept;

// One way to compute the checksums. All give the same numbers.
struct Crc32cKernel {
  const char* name;
  void (*run)(const unsigned char* pages, std::size_t num_pages, std::uint32_t* checksums) noexcept;
};

// The kernels that this processor can run, the fastest first; crc32c_pages() uses that one. The
// last is always "table", which needs no instruction of its own and is what the others are
// tested against.
[[nodiscard]] std::span<const Crc32cKernel> crc32c_kernels() noexcept;

}  // namespace infinity::io
