// CRC32C (Castagnoli, RFC 3720 appendix B.4) of pages of 4096 bytes.
//
// One checksum per page: any range of whole pages can then be checked or replaced without reading
// what is around it, and several pages are worked on at a time, which hides the latency of the
// processor's instruction without tables to combine partial results.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity::io {

inline constexpr std::size_t kChecksumPageNbytes = 4096;

// The checksum of each of `num_pages` pages at `pages`.
void crc32c_pages(const void* pages, std::size_t num_pages, std::uint32_t* checksums) noexcept;

// The first page whose checksum is not the expected one; `num_pages` when all are right.
[[nodiscard]] std::size_t first_bad_page(const void* pages, std::size_t num_pages,
                                         const std::uint32_t* expected) noexcept;

// Whether the processor's own instruction is used (SSE4.2).
[[nodiscard]] bool has_crc32c_instruction() noexcept;

// The same by table, eight bits at a time: for other processors, and to check the fast one.
void crc32c_pages_by_table(const void* pages, std::size_t num_pages,
                           std::uint32_t* checksums) noexcept;

}  // namespace infinity::io
