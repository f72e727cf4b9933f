#include "infinity_io/crc32c.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "check.h"

namespace crc32c_test {

using namespace infinity::io;

namespace {

std::vector<unsigned char> random_pages(std::size_t num_pages) {
  std::mt19937 random(static_cast<unsigned>(num_pages));
  std::vector<unsigned char> bytes(num_pages * kChecksumPageNbytes);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

// Bit by bit, from the definition.
std::uint32_t crc32c(const unsigned char* bytes, std::size_t count) {
  std::uint32_t crc = 0xFFFFFFFF;
  for (std::size_t at = 0; at < count; ++at) {
    crc ^= bytes[at];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78U : 0U);
  }
  return ~crc;
}

}  // namespace

TEST(DefinitionGivesTheCheckValueOfTheStandard) {
  CHECK(crc32c(reinterpret_cast<const unsigned char*>("123456789"), 9) == 0xE3069283);
}

TEST(TableGivesWhatTheDefinitionGives) {
  CHECK(crc32c_kernels().back().name == std::string_view("table"));
  const std::vector<unsigned char> pages = random_pages(5);
  std::vector<std::uint32_t> found(5);
  crc32c_kernels().back().run(pages.data(), 5, found.data());
  for (std::size_t page = 0; page < 5; ++page) {
    CHECK(found[page] == crc32c(&pages[page * kChecksumPageNbytes], kChecksumPageNbytes));
  }
}

// Both go over the same bytes; the checksums must be those of the table, and nothing behind them
// may be written.
void compare_with_table(const Crc32cKernel& kernel, const unsigned char* pages,
                        std::size_t num_pages) {
  constexpr std::uint32_t kUntouched = 0xDEADBEEF;
  std::vector<std::uint32_t> expected(num_pages), found(num_pages + 1, kUntouched);
  crc32c_kernels().back().run(pages, num_pages, expected.data());
  kernel.run(pages, num_pages, found.data());
  CHECK(found.back() == kUntouched);
  found.pop_back();
  CHECK(found == expected);
}

TEST(EveryKernelGivesTheChecksumsOfTheTableForAnyNumberOfPages) {
  const std::vector<unsigned char> pages = random_pages(70);
  for (const Crc32cKernel& kernel : crc32c_kernels()) {
    std::printf("  %s\n", kernel.name);
    for (std::size_t count = 0; count <= 20; ++count)
      compare_with_table(kernel, pages.data(), count);
    compare_with_table(kernel, pages.data(), 70);
  }
}

TEST(EveryKernelGivesTheChecksumsOfTheTableAtAnyAlignment) {
  const std::vector<unsigned char> pages = random_pages(10);
  for (const Crc32cKernel& kernel : crc32c_kernels()) {
    for (std::size_t offset = 0; offset <= 65; ++offset) {
      compare_with_table(kernel, pages.data() + offset, 9);
    }
  }
}

TEST(EveryKernelGivesTheChecksumsOfTheTableForPagesOfOneByteAndForSingleBits) {
  std::vector<unsigned char> pages(16 * kChecksumPageNbytes);
  for (const Crc32cKernel& kernel : crc32c_kernels()) {
    for (const unsigned byte : {0x00U, 0xFFU, 0x80U, 0x01U}) {
      std::fill(pages.begin(), pages.end(), static_cast<unsigned char>(byte));
      compare_with_table(kernel, pages.data(), 16);
    }
    std::fill(pages.begin(), pages.end(), static_cast<unsigned char>(0));
    for (std::size_t at = 0; at < pages.size(); at += 509) {
      pages[at] = static_cast<unsigned char>(1U << at % 8);
      compare_with_table(kernel, pages.data(), 16);
      pages[at] = 0;
    }
  }
}

TEST(OneFlippedBitIsFoundOnItsPage) {
  constexpr std::size_t kNumPages = 200;
  std::vector<unsigned char> pages = random_pages(kNumPages);
  std::vector<std::uint32_t> expected(kNumPages);
  crc32c_pages(pages.data(), kNumPages, expected.data());
  CHECK(first_bad_page(pages.data(), kNumPages, expected.data()) == kNumPages);
  for (const std::size_t page : {0U, 63U, 64U, 199U}) {
    unsigned char& victim = pages[page * kChecksumPageNbytes + 17 * page];
    victim ^= 4;
    CHECK(first_bad_page(pages.data(), kNumPages, expected.data()) == page);
    victim ^= 4;
  }
}

}  // namespace crc32c_test
