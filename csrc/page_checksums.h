// Checksums of many pages by several threads. The numbers are those of infinity_io/crc32c.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace infinity {

// As io::crc32c_pages, on at most `num_threads` threads of the process's pool. Blocks.
void crc32c_pages(const void* pages, std::size_t num_pages, std::uint32_t* checksums,
                  std::size_t num_threads);

// As io::first_bad_page, on at most `num_threads` threads of the process's pool. Blocks.
[[nodiscard]] std::size_t first_bad_page(const void* pages, std::size_t num_pages,
                                         const std::uint32_t* expected, std::size_t num_threads);

// The checksums of a range of pages that are taken as the pages are written, while a cache has them.
class PageDigests {
 public:
  // The memory outlives the object, and changes by no other hand than those that call `add`.
  PageDigests(const void* pages, std::size_t num_pages);

  // Takes the checksums of the pages of this object that lie within the range. Threads may call at
  // once for ranges that do not overlap.
  void add(const void* start, std::size_t nbytes);

  // Returns the checksum of each page; those that no range had are taken now, as by
  // `crc32c_pages`.
  [[nodiscard]] std::vector<std::uint32_t> finish(std::size_t num_threads);

 private:
  const unsigned char* pages_;
  std::vector<std::uint32_t> checksums_;
  std::vector<unsigned char> is_known_;  // One for each page.
};

}  // namespace infinity
