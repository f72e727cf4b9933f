// Setting up a ring with the best flags this kernel takes. Only built with liburing.
#pragma once

#include <cerrno>
#include <cstdint>
#include <ctime>

#include <liburing.h>

#include "infinity_io/probe.h"

#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace infinity::io {

// Linux 6.15; liburing 2.3 does not name them.
inline constexpr int kReadVectorFixed = 60;
inline constexpr int kWriteVectorFixed = 61;

// The memory of a ring that was closed counts against the memlock limit for a moment longer.
inline constexpr int kMaxMemoryTries = 10;

inline void await_memory() noexcept {
  const timespec ten_ms{0, 10'000'000};
  nanosleep(&ten_ms, nullptr);
}

// Tries what `wanted` names; kAuto: SINGLE_ISSUER|DEFER_TASKRUN (6.1), COOP_TASKRUN (5.19), then
// nothing. `flags` receives what was granted. Returns 0 or a positive errno. The calling thread
// must be the one that uses the ring.
[[nodiscard]] inline int set_up_ring(io_uring& ring, unsigned num_entries, RingFlags wanted,
                                     std::uint32_t& flags) noexcept {
  struct Rung {
    RingFlags name;
    std::uint32_t flags;
  };
  constexpr Rung kLadder[] = {
      {RingFlags::kDefer, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN},
      {RingFlags::kCoop, IORING_SETUP_COOP_TASKRUN},
      {RingFlags::kNone, 0}};
  int code = EINVAL;
  for (const Rung& rung : kLadder) {
    if (wanted != RingFlags::kAuto && wanted != rung.name) continue;
    for (int tries = 0; tries < kMaxMemoryTries; ++tries) {
      io_uring_params params{};
      params.flags = rung.flags | IORING_SETUP_CLAMP;
      code = -io_uring_queue_init_params(num_entries, &ring, &params);
      if (code != ENOMEM) break;
      await_memory();
    }
    flags = rung.flags;
    if (code != EINVAL) break;
  }
  return code;
}

}  // namespace infinity::io
