#include "arena.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace infinity {

namespace {

constexpr int kReserveFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

void* pointer(std::uintptr_t address) noexcept {
  return reinterpret_cast<void*>(address);  // NOLINT: addresses are handled as integers.
}

std::uintptr_t integer(void* pointer) noexcept { return reinterpret_cast<std::uintptr_t>(pointer); }

// Maps `nbytes` at a multiple of 2 MiB: maps more and gives the ends back. 0 with errno set:
// failed.
std::uintptr_t map_aligned(std::size_t nbytes, int protection, int flags) noexcept {
  const std::size_t wide_nbytes = nbytes + kHugePageNbytes;
  void* wide = mmap(nullptr, wide_nbytes, protection, flags, -1, 0);
  if (wide == MAP_FAILED) return 0;
  const std::uintptr_t start = integer(wide);
  const std::uintptr_t aligned = (start + kHugePageNbytes - 1) / kHugePageNbytes * kHugePageNbytes;
  if (aligned > start) munmap(wide, aligned - start);
  const std::size_t tail_nbytes = start + wide_nbytes - (aligned + nbytes);
  if (tail_nbytes > 0) munmap(pointer(aligned + nbytes), tail_nbytes);
  return aligned;
}

// Returns a file in memory of a fixed size, or -1 with errno set. memfd_create(2), fcntl(2).
int open_memory(std::size_t nbytes) noexcept {
  const int descriptor = memfd_create("infinity-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (descriptor < 0) return -1;
  // Who maps the file could not touch pages behind its end.
  if (ftruncate(descriptor, static_cast<off_t>(nbytes)) == 0 &&
      fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
    return descriptor;
  }
  const int code = errno;
  close(descriptor);
  errno = code;
  return -1;
}

// Without libnuma: mbind(2), MPOL_PREFERRED. The threads that touch the pages may run anywhere.
bool prefer_node(std::uintptr_t address, std::size_t nbytes, int node) noexcept {
  constexpr int kPreferred = 1;
  constexpr std::size_t kBits = 8 * sizeof(unsigned long);
  unsigned long mask[16] = {};
  const auto bit = static_cast<std::size_t>(node);
  if (node < 0 || bit >= kBits * std::size(mask)) return false;
  mask[bit / kBits] = 1UL << (bit % kBits);
  return syscall(SYS_mbind, pointer(address), nbytes, kPreferred, mask,
                 kBits * std::size(mask) + 1, 0U) == 0;
}

struct Slice {
  std::uintptr_t address = 0;
  std::size_t nbytes = 0;
  bool huge_pages = false;
  int code = 0;
  pthread_t thread{};
  bool is_threaded = false;
};

// First touch is the expensive part of a large arena: 0.1-1.7 s per GiB.
void* populate(void* argument) noexcept {
  Slice& slice = *static_cast<Slice*>(argument);
  void* start = pointer(slice.address);
  if (madvise(start, slice.nbytes, MADV_POPULATE_WRITE) != 0) {
    if (errno != EINVAL) {
      slice.code = errno;
      return nullptr;
    }
    auto* bytes = static_cast<volatile char*>(start);  // Before 5.14: touch every page.
    for (std::size_t at = 0; at < slice.nbytes; at += kPageNbytes) bytes[at] = 0;
  }
  // Where no huge page was free at the moment of the touch (6.1; refusal is fine: it is verified).
  if (slice.huge_pages) madvise(start, slice.nbytes, MADV_COLLAPSE);
  return nullptr;
}

constexpr unsigned kMaxPopulateThreads = 16;

int populate_all(std::uintptr_t address, std::size_t nbytes, bool huge_pages,
                 unsigned num_threads) noexcept {
  Slice slices[kMaxPopulateThreads];
  const std::size_t count = std::clamp(num_threads, 1U, kMaxPopulateThreads);
  const std::size_t num_huge = (nbytes + kHugePageNbytes - 1) / kHugePageNbytes;
  const std::size_t slice_nbytes = (num_huge + count - 1) / count * kHugePageNbytes;
  for (std::size_t index = 0; index < count; ++index) {
    Slice& slice = slices[index];
    const std::size_t offset = std::min(nbytes, index * slice_nbytes);
    slice.address = address + offset;
    slice.nbytes = std::min(slice_nbytes, nbytes - offset);
    slice.huge_pages = huge_pages;
    if (slice.nbytes == 0) continue;
    slice.is_threaded = pthread_create(&slice.thread, nullptr, &populate, &slice) == 0;
    if (!slice.is_threaded) populate(&slice);
  }
  int code = 0;
  for (Slice& slice : slices) {
    if (slice.is_threaded) pthread_join(slice.thread, nullptr);
    if (code == 0) code = slice.code;
  }
  return code;
}

// Leaves fresh, unreadable address space behind; neighbours of the same kind merge with it.
int reserve_again(std::uintptr_t address, std::size_t nbytes) noexcept {
  void* got = mmap(pointer(address), nbytes, PROT_NONE, kReserveFlags | MAP_FIXED, -1, 0);
  return got == MAP_FAILED ? errno : 0;
}

int move_pages(std::uintptr_t from, std::size_t nbytes, std::uintptr_t to) noexcept {
  void* got = mremap(pointer(from), nbytes, nbytes,
                     MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, pointer(to));
  return got == MAP_FAILED ? errno : 0;
}

bool is_range(std::size_t offset, std::size_t nbytes, std::size_t capacity) noexcept {
  return nbytes > 0 && offset % kPageNbytes == 0 && nbytes % kPageNbytes == 0 &&
         offset <= capacity && nbytes <= capacity - offset;
}

std::size_t nbytes_of(std::size_t nbytes) noexcept { return nbytes; }

template <typename Mapped>
std::size_t nbytes_of(const Mapped& mapped) noexcept {
  return mapped.nbytes;
}

// Whether any range in `ranges`, by offset, has a byte in common with the given one.
template <typename Value>
bool overlaps(const std::map<std::size_t, Value>& ranges, std::size_t offset,
              std::size_t nbytes) noexcept {
  auto next = ranges.lower_bound(offset);
  if (next != ranges.end() && next->first < offset + nbytes) return true;
  if (next == ranges.begin()) return false;
  --next;
  return next->first + nbytes_of(next->second) > offset;
}

}  // namespace

Arena::~Arena() {
  if (address_ != 0) munmap(pointer(address_), capacity_nbytes_);
  close_file();
}

void Arena::close_file() noexcept {
  if (descriptor_ >= 0) close(descriptor_);
  descriptor_ = -1;
}

int Arena::open(std::size_t capacity_nbytes, bool huge_pages, unsigned num_threads, int numa_node,
                bool is_shared) noexcept {
  const std::uintptr_t address =
      map_aligned(capacity_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS);
  if (address == 0) return errno;
  address_ = address;
  capacity_nbytes_ = capacity_nbytes;
  void* start = pointer(address);
  if (is_shared) {
    descriptor_ = open_memory(capacity_nbytes);
    if (descriptor_ < 0) return errno;
    const void* got = mmap(start, capacity_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                           descriptor_, 0);
    if (got == MAP_FAILED) return errno;
  }
  // A fork with a pinned arena would copy all of it: 0.5-0.8 s and the same memory again per GiB.
  madvise(start, capacity_nbytes, MADV_DONTFORK);
  madvise(start, capacity_nbytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  prefers_node_ = prefer_node(address, capacity_nbytes, numa_node);  // Before the first touch.
  return populate_all(address, capacity_nbytes, huge_pages, num_threads);
}

ArenaView::~ArenaView() {
  if (address_ != 0) munmap(pointer(address_), nbytes_);
}

int ArenaView::open(int descriptor, std::size_t nbytes) noexcept {
  const int seals = fcntl(descriptor, F_GET_SEALS);
  struct stat found {};
  if (seals < 0 || fstat(descriptor, &found) != 0) return errno;
  if ((seals & F_SEAL_SHRINK) == 0 || static_cast<std::size_t>(found.st_size) < nbytes) {
    return EINVAL;
  }
  const std::uintptr_t address = map_aligned(nbytes, PROT_NONE, kReserveFlags);
  if (address == 0) return errno;
  address_ = address;
  nbytes_ = nbytes;
  void* start = pointer(address);
  if (mmap(start, nbytes, PROT_READ, MAP_SHARED | MAP_FIXED, descriptor, 0) == MAP_FAILED) {
    return errno;
  }
  madvise(start, nbytes, MADV_DONTFORK);
  return 0;
}

Window::~Window() {
  if (address_ != 0) munmap(pointer(address_), capacity_nbytes_);
}

int Window::open(std::size_t capacity_nbytes) noexcept {
  const std::uintptr_t address = map_aligned(capacity_nbytes, PROT_NONE, kReserveFlags);
  if (address == 0) return errno;
  address_ = address;
  capacity_nbytes_ = capacity_nbytes;
  poison_.open(capacity_nbytes);
  return empty(0, capacity_nbytes);
}

int Window::empty(std::size_t offset_nbytes, std::size_t nbytes) const noexcept {
  if (poison_.cover(address_, offset_nbytes, nbytes) == 0) return 0;
  return reserve_again(address_ + offset_nbytes, nbytes);
}

int Window::map(Arena& arena, std::size_t arena_offset_nbytes, std::size_t nbytes,
                std::size_t window_offset_nbytes) {
  if (!is_range(arena_offset_nbytes, nbytes, arena.capacity_nbytes_) ||
      !is_range(window_offset_nbytes, nbytes, capacity_nbytes_)) {
    return ERANGE;
  }
  // Mapping over a range would throw its pages away; mapping a hole would later overwrite pages.
  if (overlaps(arena.away_, arena_offset_nbytes, nbytes) ||
      overlaps(mapped_, window_offset_nbytes, nbytes)) {
    return EBUSY;
  }
  // Recorded before they move: pages that nobody knows would be lost to the next move.
  arena.away_.emplace(arena_offset_nbytes, nbytes);
  mapped_.emplace(window_offset_nbytes, Mapped{nbytes, &arena, arena_offset_nbytes});
  const std::uintptr_t home = arena.address_ + arena_offset_nbytes;
  const std::uintptr_t place = address_ + window_offset_nbytes;
  int code = move_pages(home, nbytes, place);
  if (code == 0) {
    code = reserve_again(home, nbytes);
    // If they cannot go back, they stay recorded, so that moving them once more is refused.
    if (code == 0 || move_pages(place, nbytes, home) != 0) return code;
    static_cast<void>(empty(window_offset_nbytes, nbytes));
  }
  mapped_.erase(window_offset_nbytes);
  arena.away_.erase(arena_offset_nbytes);
  return code;
}

int Window::unmap(Arena& arena, std::size_t arena_offset_nbytes, std::size_t nbytes,
                  std::size_t window_offset_nbytes) {
  const auto mapped = mapped_.find(window_offset_nbytes);
  if (mapped == mapped_.end() || mapped->second.nbytes != nbytes ||
      mapped->second.arena != &arena || mapped->second.arena_offset_nbytes != arena_offset_nbytes) {
    return ENOENT;
  }
  const std::uintptr_t home = arena.address_ + arena_offset_nbytes;
  const std::uintptr_t place = address_ + window_offset_nbytes;
  if (const int code = move_pages(place, nbytes, home)) return code;
  const int code = empty(window_offset_nbytes, nbytes);
  if (code != 0 && move_pages(home, nbytes, place) == 0) {
    static_cast<void>(reserve_again(home, nbytes));
    return code;  // All is as before; or else the pages are home, which is what was asked for.
  }
  mapped_.erase(mapped);
  arena.away_.erase(arena_offset_nbytes);
  return 0;
}

bool can_remap() noexcept {
  constexpr std::size_t kNbytes = 2 * kHugePageNbytes;
  Arena arena;
  Window window;
  if (arena.open(kNbytes, true, 1) != 0 || window.open(kNbytes) != 0) return false;
  auto* in_arena = static_cast<unsigned char*>(pointer(arena.address()));
  const auto* in_window = static_cast<const unsigned char*>(pointer(window.address()));
  std::memset(in_arena, 0x5A, kNbytes);
  if (window.map(arena, 0, kNbytes, 0) != 0) return false;
  const bool has_moved = in_window[0] == 0x5A && in_window[kNbytes - 1] == 0x5A;
  if (window.unmap(arena, 0, kNbytes, 0) != 0) return false;
  return has_moved && in_arena[0] == 0x5A && in_arena[kNbytes - 1] == 0x5A;
}

}  // namespace infinity
