#include "arena.h"

#include <cerrno>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

using namespace infinity;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

unsigned char* at(std::uintptr_t address) { return reinterpret_cast<unsigned char*>(address); }

int num_failing = 0;  // Of the next calls of mmap.

}  // namespace

extern "C" {
void* __real_mmap(void*, std::size_t, int, int, int, off_t);

void* __wrap_mmap(void* start, std::size_t nbytes, int protection, int flags, int file, off_t from) {
  if (num_failing == 0) return __real_mmap(start, nbytes, protection, flags, file, from);
  --num_failing;
  errno = ENOMEM;
  return MAP_FAILED;
}
}

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

TEST(PagesOfASharedArenaAreThoseOfItsFile) {
  if (!can_remap()) return;
  Arena arena;
  Window window;
  CHECK(arena.open(8 * kMiB, true, 2, -1, true) == 0 && window.open(4 * kMiB) == 0);
  CHECK(ftruncate(arena.descriptor(), 0) == -1 && errno == EPERM);
  void* other = mmap(nullptr, 8 * kMiB, PROT_READ, MAP_SHARED, arena.descriptor(), 0);
  CHECK(other != MAP_FAILED);
  arena.close_file();
  CHECK(arena.descriptor() == -1);
  if (window.map(arena, 2 * kMiB, 4 * kMiB, 0) == 0) {  // Linux 5.13.
    std::memset(at(window.address()), 7, 4 * kMiB);
    CHECK(static_cast<unsigned char*>(other)[2 * kMiB] == 7);
    CHECK(window.unmap(arena, 2 * kMiB, 4 * kMiB, 0) == 0);
    CHECK(at(arena.address())[6 * kMiB - 1] == 7);
  }
  munmap(other, 8 * kMiB);
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

TEST(PagesAreWhereTheyWereAfterAMoveThatFailed) {
  if (!can_remap()) return;
  Arena arena;
  Window window;
  CHECK(arena.open(4 * kMiB, true, 1) == 0 && window.open(4 * kMiB) == 0);
  std::memset(at(arena.address()), 7, 4 * kMiB);
  num_failing = 1;  // What reserves the arena's addresses.
  CHECK(window.map(arena, 0, 2 * kMiB, 0) == ENOMEM && num_failing == 0);
  CHECK(at(arena.address())[0] == 7 && at(arena.address())[2 * kMiB - 1] == 7);
  CHECK(at(window.address())[0] == 0xFF);
  CHECK(window.map(arena, 0, 2 * kMiB, 0) == 0);
  CHECK(at(window.address())[0] == 7);
  num_failing = 2;  // Poison, and the addresses without access that would do as well.
  CHECK(window.unmap(arena, 0, 2 * kMiB, 0) == ENOMEM && num_failing == 0);
  CHECK(at(window.address())[0] == 7 && at(window.address())[2 * kMiB - 1] == 7);
  CHECK(window.map(arena, 0, 2 * kMiB, 2 * kMiB) == EBUSY);
  CHECK(window.unmap(arena, 0, 2 * kMiB, 0) == 0);
  CHECK(at(arena.address())[0] == 7 && at(window.address())[0] == 0xFF);
}

TEST(WindowWithoutPagesReadsAsPoison) {
  if (!can_remap()) return;
  constexpr std::size_t kNbytes = 20 * kMiB;  // Three pieces, the last one cut.
  Arena arena;
  Window window;
  CHECK(arena.open(kNbytes, true, 1) == 0 && window.open(kNbytes) == 0);
  const auto is_poison = [&window](std::size_t from, std::size_t to) {
    for (std::size_t i = from; i < to; ++i) {
      if (at(window.address())[i] != 0xFF) return false;
    }
    return true;
  };
  CHECK(is_poison(0, kNbytes));
  CHECK(window.map(arena, 0, 10 * kMiB, 6 * kMiB) == 0);
  CHECK(is_poison(0, 6 * kMiB) && is_poison(16 * kMiB, kNbytes));
  CHECK(at(window.address())[6 * kMiB] == 0 && at(window.address())[16 * kMiB - 1] == 0);
  CHECK(window.unmap(arena, 0, 10 * kMiB, 6 * kMiB) == 0);
  CHECK(is_poison(0, kNbytes));
}

TEST(PoisonBeyondTheBudgetOfMappingsIsRefused) {
  Poison small, large, late;
  CHECK(small.open(kPageNbytes));
  CHECK(!large.open(kMaxPoisonPieces * kMaxPoisonPieceNbytes));
  CHECK(large.cover(0, 0, kPageNbytes) == EOPNOTSUPP);
  {
    Poison most;
    CHECK(most.open((kMaxPoisonPieces - 1) * kMaxPoisonPieceNbytes));
    CHECK(!late.open(kPageNbytes));
  }
  CHECK(late.open(kPageNbytes));
}

int main() { return check::run_tests(); }
