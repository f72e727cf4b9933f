// What this kernel, in this sandbox, lets us do. Always by trying, never by version number.
#pragma once

#include <cstdint>
#include <string>

#include "infinity_io/status.h"

namespace infinity::io {

// True when the library was built with liburing.
[[nodiscard]] bool built_with_uring() noexcept;

// What a ring is set up with. kAuto takes the first of the others, in this order, that the kernel
// grants.
enum class RingFlags : std::uint8_t { kAuto, kDefer, kCoop, kNone };

struct UringProbe {
  bool usable = false;
  int code = 0;           // errno of the step that failed
  const char* step = "";  // "build", "io_uring_setup", "features", "opcodes", "io_uring_enter"
  std::uint32_t ring_flags = 0;  // what the kernel granted
};

// Sets up a real ring, asks for the opcodes we use and lets a no-op through. Below a millisecond
// for a small one; a tenth of a second where the memlock limit refuses it.
[[nodiscard]] UringProbe probe_uring(RingFlags wanted = RingFlags::kAuto,
                                     std::uint32_t num_entries = 4) noexcept;

struct DirectAlignment {
  std::uint32_t memory_nbytes = 0;  // 0: the kernel or the file system does not say
  std::uint32_t offset_nbytes = 0;
};

// statx STATX_DIOALIGN of an open file (Linux 6.1).
[[nodiscard]] DirectAlignment direct_alignment(int fd) noexcept;

}  // namespace infinity::io
