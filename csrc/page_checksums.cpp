#include "page_checksums.h"

#include <algorithm>
#include <atomic>

#include "infinity_io/crc32c.h"
#include "update/thread_pool.h"

namespace infinity {

namespace {

// What a thread takes at a time: half a MiB, some tens of microseconds. Waking a thread costs less.
constexpr std::size_t kItemPages = 128;

struct Item {
  const unsigned char* pages;
  std::size_t first;
  std::size_t num_pages;
};

Item item_at(const void* pages, std::size_t num_pages, std::size_t index) {
  const std::size_t first = index * kItemPages;
  const auto* bytes = static_cast<const unsigned char*>(pages);
  return {bytes + first * io::kChecksumPageNbytes, first, std::min(kItemPages, num_pages - first)};
}

std::size_t num_items(std::size_t num_pages) { return (num_pages + kItemPages - 1) / kItemPages; }

}  // namespace

void crc32c_pages(const void* pages, std::size_t num_pages, std::uint32_t* checksums,
                  std::size_t num_threads) {
  update::process_pool().run(num_items(num_pages), num_threads, [&](std::size_t index) {
    const Item item = item_at(pages, num_pages, index);
    io::crc32c_pages(item.pages, item.num_pages, checksums + item.first);
  });
}

std::size_t first_bad_page(const void* pages, std::size_t num_pages, const std::uint32_t* expected,
                           std::size_t num_threads) {
  std::atomic<std::size_t> first_bad{num_pages};
  update::process_pool().run(num_items(num_pages), num_threads, [&](std::size_t index) {
    const Item item = item_at(pages, num_pages, index);
    const std::size_t bad = io::first_bad_page(item.pages, item.num_pages, expected + item.first);
    if (bad == item.num_pages) return;
    std::size_t before = first_bad.load();
    while (item.first + bad < before && !first_bad.compare_exchange_weak(before, item.first + bad)) {
    }
  });
  return first_bad.load();
}

PageDigests::PageDigests(const void* pages, std::size_t num_pages)
    : pages_(static_cast<const unsigned char*>(pages)),
      checksums_(num_pages),
      is_known_(num_pages) {}

void PageDigests::add(const void* start, std::size_t nbytes) {
  const auto* const first_byte = static_cast<const unsigned char*>(start);
  const unsigned char* const end = pages_ + checksums_.size() * io::kChecksumPageNbytes;
  if (first_byte >= end || first_byte + nbytes <= pages_) return;
  const std::size_t skipped = first_byte > pages_ ? static_cast<std::size_t>(first_byte - pages_) : 0;
  const std::size_t first = (skipped + io::kChecksumPageNbytes - 1) / io::kChecksumPageNbytes;
  const auto last = static_cast<std::size_t>(std::min(first_byte + nbytes, end) - pages_) /
                    io::kChecksumPageNbytes;
  if (last <= first) return;
  io::crc32c_pages(pages_ + first * io::kChecksumPageNbytes, last - first, &checksums_[first]);
  std::fill_n(is_known_.begin() + static_cast<std::ptrdiff_t>(first), last - first, 1);
}

std::vector<std::uint32_t> PageDigests::finish(std::size_t num_threads) {
  auto run = std::find(is_known_.begin(), is_known_.end(), 0);
  while (run != is_known_.end()) {
    const auto end = std::find(run, is_known_.end(), 1);
    const auto first = static_cast<std::size_t>(run - is_known_.begin());
    crc32c_pages(pages_ + first * io::kChecksumPageNbytes, static_cast<std::size_t>(end - run),
                 &checksums_[first], num_threads);
    std::fill(run, end, 1);
    run = std::find(end, is_known_.end(), 0);
  }
  return checksums_;
}

}  // namespace infinity
