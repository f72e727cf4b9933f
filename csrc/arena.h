// Anonymous memory that I/O goes to and from, and windows through which its pages are seen.
//
// Note "moving pages". A window is reserved address space. map() moves the page table entries of an
// arena range into it with mremap(MREMAP_DONTUNMAP), unmap() moves them back: no byte is copied and
// the physical pages stay the same, so a registration of the arena with a ring or a GPU stays
// right.
//
// What is left behind in the arena is made PROT_NONE: only the tiers use its addresses, a stray
// touch is their bug and faults, and a ring that tried to register a hole is refused instead of
// pinning the wrong pages. What is left behind in the window is poison (poison.h): tensors of the
// user may still point there, so a stale read gives NaN instead of ending the interpreter. A stale
// write faults. Windows for which poison would take too many mappings are PROT_NONE there, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "poison.h"

namespace infinity {

inline constexpr std::size_t kPageNbytes = 4096;
inline constexpr std::size_t kHugePageNbytes = std::size_t{2} << 20;

// One populated mapping, aligned to 2 MiB, kept out of forks. Pages are zero at first. It is
// anonymous, or, if it is shared, of a file in memory that other processes can map, too.
class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  // Maps and populates; `capacity_nbytes` must be a multiple of kPageNbytes. Returns 0 or an errno.
  // `numa_node`: where pages shall lie as long as there are free ones; negative: anywhere.
  [[nodiscard]] int open(std::size_t capacity_nbytes, bool huge_pages, unsigned num_threads,
                         int numa_node = -1, bool is_shared = false) noexcept;

  // The file of a shared arena, sealed against truncation; -1 without one, and after close_file().
  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }

  // What is mapped stays. A child of a fork, which inherits the file, would keep the memory.
  void close_file() noexcept;

  // Whether the kernel took the wish of `numa_node`.
  [[nodiscard]] bool prefers_node() const noexcept { return prefers_node_; }

  [[nodiscard]] std::uintptr_t address() const noexcept { return address_; }
  [[nodiscard]] std::size_t capacity_nbytes() const noexcept { return capacity_nbytes_; }

 private:
  friend class Window;

  std::uintptr_t address_ = 0;
  std::size_t capacity_nbytes_ = 0;
  bool prefers_node_ = false;
  int descriptor_ = -1;
  std::map<std::size_t, std::size_t> away_;  // offset -> bytes that are in some window
};

// The memory of a shared arena of another process, read-only, aligned as there, kept out of forks.
class ArenaView {
 public:
  ArenaView() = default;
  ArenaView(const ArenaView&) = delete;
  ArenaView& operator=(const ArenaView&) = delete;
  ~ArenaView();

  // Maps a file, which the caller may then close. Returns 0 or an errno: EINVAL for a file that is
  // shorter, or that may become shorter; touching what is missing would be SIGBUS.
  [[nodiscard]] int open(int descriptor, std::size_t nbytes) noexcept;

  [[nodiscard]] std::uintptr_t address() const noexcept { return address_; }
  [[nodiscard]] std::size_t nbytes() const noexcept { return nbytes_; }

 private:
  std::uintptr_t address_ = 0;
  std::size_t nbytes_ = 0;
};

// Reserved address space of the same alignment, without memory of its own. Not thread-safe.
class Window {
 public:
  Window() = default;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  ~Window();

  // Each returns 0 or an errno: ERANGE for offsets or lengths that are not multiples of kPageNbytes
  // or not in range, EBUSY for a range that is mapped or away already, ENOENT for an unmap() that
  // does not repeat the arguments of a map(). After an error, pages are where they were.
  [[nodiscard]] int open(std::size_t capacity_nbytes) noexcept;
  [[nodiscard]] int map(Arena& arena, std::size_t arena_offset_nbytes, std::size_t nbytes,
                        std::size_t window_offset_nbytes);
  [[nodiscard]] int unmap(Arena& arena, std::size_t arena_offset_nbytes, std::size_t nbytes,
                          std::size_t window_offset_nbytes);

  [[nodiscard]] std::uintptr_t address() const noexcept { return address_; }
  [[nodiscard]] std::size_t capacity_nbytes() const noexcept { return capacity_nbytes_; }

 private:
  struct Mapped {
    std::size_t nbytes = 0;
    const Arena* arena = nullptr;
    std::size_t arena_offset_nbytes = 0;
  };

  // Takes the pages away from a range: poison, or no access.
  int empty(std::size_t offset_nbytes, std::size_t nbytes) const noexcept;

  std::map<std::size_t, Mapped> mapped_;  // by window offset
  Poison poison_;
  std::uintptr_t address_ = 0;
  std::size_t capacity_nbytes_ = 0;
};

// Whether this kernel moves pages as a Window needs it, found by doing it (MREMAP_DONTUNMAP: 5.7).
[[nodiscard]] bool can_remap() noexcept;

}  // namespace infinity
