// What a caller asks for (Segment, Priority), and what the caller gets (Request, the ticket).
//
// Ownership. The buffers named in the segments belong to the request from submit() until done(). A
// request whose ticket was thrown away still finishes safely.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "infinity_io/histogram.h"
#include "infinity_io/status.h"

namespace infinity::io {

// Smaller is more urgent.
enum class Priority : std::uint8_t { kForward, kBackward, kState, kWriteBack, kCopy };
inline constexpr std::size_t kNumPriorities = 5;

// A contiguous range of one file and the memory it moves to or from. Addresses are plain integers:
// the library never looks at the bytes itself.
struct Segment {
  std::int32_t file = -1;
  std::uint64_t offset_nbytes = 0;
  std::uintptr_t address = 0;
  std::uint64_t nbytes = 0;
};

// The memory that may be registered with the ring. `nbytes` 0: none.
struct ArenaRange {
  std::uintptr_t address = 0;
  std::uint64_t nbytes = 0;

  [[nodiscard]] bool holds(std::uintptr_t at, std::uint64_t count) const noexcept {
    return at >= address && count <= nbytes && at - address <= nbytes - count;
  }
};

struct FileStats {
  std::uint64_t read_nbytes = 0;
  std::uint64_t write_nbytes = 0;
  std::uint64_t num_reads = 0;   // blocks, not requests
  std::uint64_t num_writes = 0;  // blocks, not requests
  std::uint64_t num_retries = 0;
  std::uint64_t num_short_transfers = 0;
  std::uint64_t num_errors = 0;
  std::uint64_t max_in_flight = 0;        // blocks
  std::chrono::nanoseconds busy{0};       // time with at least one block in flight
  std::chrono::nanoseconds in_flight{0};  // summed over blocks; divided by `busy`: the mean depth
  Histogram read_latency;                 // of blocks, from issue to completion
  Histogram write_latency;

  FileStats& operator+=(const FileStats& other) noexcept;
};

// When the bytes that one request has in one file were on their way. Both times are read from the
// monotonic clock by the thread of the lane, at the moment it gives a block to the kernel and at
// the moment it sees its completion. A file without a completed block has neither.
struct Passage {
  std::int32_t file = -1;
  std::uint64_t nbytes = 0;
  std::chrono::steady_clock::time_point issued_at{};     // the first block
  std::chrono::steady_clock::time_point completed_at{};  // the last block

  [[nodiscard]] bool has_moved() const noexcept {
    return completed_at.time_since_epoch().count() != 0;
  }
};

class QueuedRequest;

// What a ticket holds: the state of a submitted request. Any thread may call any method.
class Request {
 public:
  explicit Request(std::shared_ptr<QueuedRequest> queued) noexcept;

  // True once every block has been settled: the buffers are the caller's again.
  [[nodiscard]] bool done() const noexcept;

  // Whether a block has failed already, or was dropped.
  [[nodiscard]] bool failed() const noexcept;

  // Waits for done(), at most `timeout`. Returns done().
  [[nodiscard]] bool wait_for(std::chrono::nanoseconds timeout) noexcept;

  // Drops every block that has not been issued; what the device has begun cannot be called back.
  // Returns whether anything was dropped: the request then fails with ECANCELED, once done(). The
  // buffers stay the request's until then. Not while the engine is being closed.
  bool cancel() noexcept;

  // The first failure; stable once done().
  [[nodiscard]] Error error() const noexcept;
  [[nodiscard]] std::string error_path() const;

  // One per file; stable once done(), not to be looked at before.
  [[nodiscard]] const std::vector<Passage>& passages() const noexcept;

 private:
  const std::shared_ptr<QueuedRequest> queued_;
};

using Ticket = std::shared_ptr<Request>;

}  // namespace infinity::io
