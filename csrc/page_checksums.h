// Checksums of many pages by several threads. The numbers are those of infinity_io/crc32c.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace infinity {

// As io::crc32c_pages, on at most `num_threads` threads of the process's pool. Blocks.
void crc32c_pages(const void* pages, std::size_t num_pages, std::uint32_t* checksums,
                  std::size_t num_threads);

// As io::first_bad_page, on at most `num_threads` threads of the process's pool. Blocks.
[[nodiscard]] std::size_t first_bad_page(const void* pages, std::size_t num_pages,
                                         const std::uint32_t* expected, std::size_t num_threads);

}  // namespace infinity
