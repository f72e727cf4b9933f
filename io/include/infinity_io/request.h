// What a caller asks for (Request), and its share on one device (Part).
//
// Ownership. A Request is shared by the caller's ticket and by every Part that is not finished; the
// buffers named in its segments belong to it from submit() until done(). A Part lives inside its
// Request and is linked into one lane's queue; it drops its own reference when its last block is
// settled, so a Request whose ticket was thrown away still finishes safely.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
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

class Lane;

// An open file. `stats` and the counters are guarded by the lane's mutex, `is_open` by the
// engine's. The rest does not change from open to close.
struct File {
  std::int32_t id = -1;
  int fd = -1;
  std::string path;
  bool is_open = false;
  bool direct = false;
  bool is_read_only = false;
  std::uint64_t size_nbytes = 0;  // of a read-only file when it was opened, else 0
  std::uint32_t alignment_nbytes = 1;  // of offsets and lengths; 1 when buffered
  Lane* lane = nullptr;
  std::uint32_t num_parts = 0;  // queued or in flight
  std::uint32_t num_in_flight = 0;
  std::chrono::steady_clock::time_point busy_since;
  FileStats stats;
};

// The one of `files` with this id, or null.
[[nodiscard]] File* find_in(std::span<const std::shared_ptr<File>> files, std::int32_t id) noexcept;

class Request;

// A contiguous range of one file.
struct FileRange {
  std::int32_t file = -1;
  std::uint64_t start_nbytes = 0;
  std::uint64_t end_nbytes = 0;

  [[nodiscard]] std::uint64_t nbytes() const noexcept { return end_nbytes - start_nbytes; }
};

// The segments of one request that live on one device, and how far they have been cut into blocks.
// The lane's mutex guards it from enqueue() on.
struct Part {
  std::shared_ptr<Request> owner;  // dropped when the part is finished
  Part* next = nullptr;            // in the lane's queue
  Priority submitted_as = Priority::kForward;
  Priority priority = Priority::kForward;  // raised while a more urgent part waits for this one
  Operation operation = Operation::kRead;
  std::vector<Segment> segments;
  std::vector<File*> files;       // of each segment
  std::vector<FileRange> ranges;  // what the segments cover: sorted, neighbours merged
  std::vector<Part*> blockers;    // unfinished parts that come first, because they overlap
  std::vector<Part*> dependents;  // the same, seen from the other side
  std::chrono::steady_clock::time_point enqueued_at;
  bool is_started = false;  // a block of it has been issued
  bool is_alone = false;    // shares no block: one that it shared has failed
  std::size_t segment_index = 0;
  std::uint64_t cut_nbytes = 0;  // of the current segment
  std::uint32_t num_in_flight = 0;

  [[nodiscard]] bool is_cut() const noexcept { return segment_index == segments.size(); }
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

class Request {
 public:
  // Shapes a request that nothing is done for yet. `files` holds each file of the segments once.
  static std::shared_ptr<Request> build(Operation operation, std::span<const Segment> segments,
                                        Priority priority,
                                        std::span<const std::shared_ptr<File>> files);

  // True once every block has been settled: the buffers are the caller's again.
  [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }

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
  [[nodiscard]] const std::vector<Passage>& passages() const noexcept { return passages_; }

  // Lane threads only, from here on.
  [[nodiscard]] bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  void fail(const Error& error) noexcept;  // The first one wins.
  void note_block(std::int32_t file, std::chrono::steady_clock::time_point issued_at,
                  std::chrono::steady_clock::time_point completed_at) noexcept;
  void finish_part() noexcept;

 private:
  friend class Engine;

  void add(const Segment& segment, File* file, Operation operation, Priority priority);

  std::vector<std::shared_ptr<File>> files_;
  std::vector<Passage> passages_;  // of each file; an entry is guarded by its lane's mutex
  std::vector<Part> parts_;
  std::atomic<std::size_t> num_parts_left_{0};
  std::atomic<bool> failed_{false};
  std::atomic<bool> done_{false};
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  Error error_;
};

using Ticket = std::shared_ptr<Request>;

}  // namespace infinity::io
