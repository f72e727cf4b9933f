#include "arena.h"

#include <cerrno>
#include <cstring>

#include "check.h"

using namespace infinity;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

unsigned char* at(std::uintptr_t address) { return reinterpret_cast<unsigned char*>(address); }

}  // namespace

TEST(ArenaIsAlignedZeroedAndWritable) {
  Arena arena;
  CHECK(arena.open(5 * kMiB + kPageNbytes, true, 3) == 0);
  CHECK(arena.address() % kHugePageNbytes == 0);
  for (std::size_t i = 0; i < arena.capacity_nbytes(); i += kPageNbytes) {
    CHECK(at(arena.address())[i] == 0);
  }
  std::memset(at(arena.address()), 1, arena.capacity_nbytes());
}

TEST(PagesMoveIntoTheWindowAndBack) {
  if (!can_remap()) return;
  Arena arena;
  Window window;
  CHECK(arena.open(8 * kMiB, true, 1) == 0 && window.open(4 * kMiB) == 0);
  for (int cycle = 0; cycle < 100; ++cycle) {
    const auto mark = static_cast<unsigned char>(cycle);
    std::memset(at(arena.address() + 2 * kMiB), mark, 4 * kMiB);
    CHECK(window.map(arena, 2 * kMiB, 4 * kMiB, 0) == 0);
    CHECK(at(window.address())[0] == mark && at(window.address())[4 * kMiB - 1] == mark);
    at(window.address())[17] = 99;
    CHECK(window.unmap(arena, 2 * kMiB, 4 * kMiB, 0) == 0);
    CHECK(at(arena.address() + 2 * kMiB)[17] == 99);
  }
}

TEST(ImpossibleMovesAreRefusedAndChangeNothing) {
  if (!can_remap()) return;
  Arena arena;
  Window window, other;
  CHECK(arena.open(8 * kMiB, true, 1) == 0);
  CHECK(window.open(4 * kMiB) == 0 && other.open(4 * kMiB) == 0);
  at(arena.address())[0] = 7;
  CHECK(window.map(arena, 0, 0, 0) == ERANGE);
  CHECK(window.map(arena, 1, 4096, 0) == ERANGE);
  CHECK(window.map(arena, 0, 8 * kMiB, 0) == ERANGE);
  CHECK(window.map(arena, 6 * kMiB, 4 * kMiB, 0) == ERANGE);
  CHECK(window.map(arena, 0, 4096, ~std::size_t{4095}) == ERANGE);
  CHECK(window.unmap(arena, 0, 4096, 0) == ENOENT);
  CHECK(window.map(arena, 0, 2 * kMiB, 0) == 0);
  CHECK(other.map(arena, 0, 2 * kMiB, 0) == EBUSY);
  CHECK(other.map(arena, kMiB, 2 * kMiB, 0) == EBUSY);
  CHECK(window.map(arena, 4 * kMiB, 2 * kMiB, kMiB) == EBUSY);
  CHECK(window.unmap(arena, 0, kMiB, 0) == ENOENT);
  CHECK(window.unmap(arena, 0, 2 * kMiB, 0) == 0);
  CHECK(at(arena.address())[0] == 7);
}

int main() { return check::run_all_tests(); }
