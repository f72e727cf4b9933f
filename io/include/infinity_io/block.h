// One block: the piece of a part that the kernel moves at a time. Pure functions only.
#pragma once

#include <cstdint>

#include "infinity_io/request.h"
#include "infinity_io/status.h"

namespace infinity::io {

// The kernel takes at most 1 GiB per registered buffer; boundaries stay multiples of 2 MiB.
inline constexpr std::uint64_t kRegisteredBufferNbytes = std::uint64_t{1} << 30;

// EAGAIN and EINTR are retried this often without progress, then they are the error.
inline constexpr std::uint32_t kMaxRetries = 8;

// The memory that may be registered with the ring. `nbytes` 0: none.
struct ArenaRange {
  std::uintptr_t address = 0;
  std::uint64_t nbytes = 0;

  [[nodiscard]] bool holds(std::uintptr_t at, std::uint64_t count) const noexcept {
    return at >= address && count <= nbytes && at - address <= nbytes - count;
  }
};

// Passed by value into a slot of a lane; the request stays alive through `part`.
struct Block {
  Part* part = nullptr;
  File* file = nullptr;
  Operation operation = Operation::kRead;
  std::uint64_t offset_nbytes = 0;
  std::uintptr_t address = 0;
  std::uint32_t nbytes = 0;  // still to move
  std::uint32_t num_retries = 0;
  std::uint32_t num_stalls = 0;  // short transfers in a row that moved less than the alignment
  std::chrono::steady_clock::time_point issued_at;
};

enum class Verdict : std::uint8_t { kDone, kAgain, kFailed };

struct Judgement {
  Verdict verdict = Verdict::kDone;
  std::uint32_t moved_nbytes = 0;  // that count as moved
  bool is_retry = false;
  bool is_short = false;
  int code = 0;                  // when kFailed
  const char* detail = nullptr;  // when kFailed
};

// How much of the range at `address` one block may take: at most `block_nbytes`, and never across
// the boundary of two registered buffers.
[[nodiscard]] std::uint32_t block_span(std::uintptr_t address, std::uint64_t nbytes,
                                       std::uint32_t block_nbytes,
                                       const ArenaRange& arena) noexcept;

// The size of the block that cut_block() would cut.
[[nodiscard]] std::uint32_t next_span(const Part& part, std::uint32_t block_nbytes,
                                      const ArenaRange& arena) noexcept;

// Cuts the next block off `part`, which must not be cut to the end.
[[nodiscard]] Block cut_block(Part& part, std::uint32_t block_nbytes,
                              const ArenaRange& arena) noexcept;

// Examines what the kernel answered for `block` and moves the block on: negative, zero, short,
// exact. A short transfer continues from the last aligned byte, because direct I/O can only resume
// there: 5000 of 8192 bytes at alignment 4096 count as 4096.
[[nodiscard]] Judgement judge(Block& block, std::int64_t result) noexcept;

}  // namespace infinity::io
