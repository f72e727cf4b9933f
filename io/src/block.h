// One block: what the kernel moves at a time, a contiguous range of one file. Pure functions only.
//
// A segment larger than a block is cut; segments that go on where another ends in the file, and fit
// whole, join it, wherever in memory they are. So a block is a part of one segment, or several
// whole ones: a request for many small extents costs as few system calls as one for a large one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <sys/uio.h>

#include "infinity_io/status.h"
#include "queued_request.h"

namespace infinity::io {

// The kernel takes at most 1 GiB per registered buffer; boundaries stay multiples of 2 MiB.
inline constexpr std::uint64_t kRegisteredBufferNbytes = std::uint64_t{1} << 30;

// Ranges of memory in one block: the kernel's IOV_MAX.
inline constexpr std::size_t kMaxPieces = 1024;

// EAGAIN and EINTR are retried this often without progress, then they are the error.
inline constexpr std::uint32_t kMaxRetries = 8;

// Lives in a slot of a lane and is filled again and again, so that its lists are allocated once.
struct Block {
  std::vector<Part*> parts;   // whose bytes these are; each keeps its request alive
  std::vector<iovec> pieces;  // memory that is still to move, in the order of the file
  File* file = nullptr;
  Operation operation = Operation::kRead;
  std::uint64_t offset_nbytes = 0;
  std::uint32_t nbytes = 0;  // still to move; the sum of the pieces
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

// Makes `block` the next one of `part`, which must not be cut to the end and is not changed:
// follow with cut().
void shape_block(const Part& part, std::uint32_t block_nbytes, const ArenaRange& arena,
                 Block& block) noexcept;

// Adds all of `part`, of which nothing has been cut, if it goes on where the block ends, in the
// same direction, and the block then has at most `limit_nbytes`. Returns whether it did.
[[nodiscard]] bool extend_block(const Part& part, std::uint64_t limit_nbytes,
                                Block& block) noexcept;

// Moves `part` on by `nbytes` that a block has taken.
void cut(Part& part, std::uint64_t nbytes) noexcept;

// The registered buffer that all memory of the block lies in, or -1.
[[nodiscard]] int registered_buffer(const Block& block, const ArenaRange& arena) noexcept;

// Examines what the kernel answered for `block` and moves the block on: negative, zero, short,
// exact. A short transfer continues from the last aligned byte, because direct I/O can only resume
// there: 5000 of 8192 bytes at alignment 4096 count as 4096. A read that reaches the end which a
// read-only file had when it was opened is complete: direct I/O reads whole pages, and the last one
// of somebody else's file is seldom full.
[[nodiscard]] Judgement judge(Block& block, std::int64_t result) noexcept;

}  // namespace infinity::io
