#include "infinity_io/crc32c.h"

#include <cstring>
#include <random>
#include <vector>

#include "check.h"

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

TEST(EveryWayGivesTheSameChecksums) {
  for (const std::size_t num_pages : {0U, 1U, 3U, 4U, 5U, 70U}) {
    const std::vector<unsigned char> pages = random_pages(num_pages);
    std::vector<std::uint32_t> fast(num_pages), slow(num_pages);
    crc32c_pages(pages.data(), num_pages, fast.data());
    crc32c_pages_by_table(pages.data(), num_pages, slow.data());
    for (std::size_t page = 0; page < num_pages; ++page) {
      CHECK(fast[page] == slow[page]);
      CHECK(fast[page] == crc32c(&pages[page * kChecksumPageNbytes], kChecksumPageNbytes));
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

int main() { return check::run_all_tests(); }
