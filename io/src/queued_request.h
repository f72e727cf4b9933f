// A submitted request as the lanes see it (QueuedRequest), and its share on one device (Part).
//
// Ownership. A QueuedRequest is shared by the caller's ticket and by every Part that is not
// finished. A Part lives inside its QueuedRequest and is linked into one lane's queue; it drops its
// own reference when its last block is settled, so a request whose ticket was thrown away still
// finishes safely.
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

#include "infinity_io/request.h"
#include "infinity_io/status.h"

namespace infinity::io {

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

class QueuedRequest;

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
  std::shared_ptr<QueuedRequest> owner;  // dropped when the part is finished
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

class QueuedRequest {
 public:
  // Shapes a request that nothing is done for yet. `files` holds each file of the segments once.
  static std::shared_ptr<QueuedRequest> build(Operation operation,
                                              std::span<const Segment> segments, Priority priority,
                                              std::span<const std::shared_ptr<File>> files);

  // For the ticket; see Request.
  [[nodiscard]] bool done() const noexcept { return done_.load(std::memory_order_acquire); }
  [[nodiscard]] bool wait_for(std::chrono::nanoseconds timeout) noexcept;
  [[nodiscard]] bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  bool cancel() noexcept;
  [[nodiscard]] Error error() const noexcept;
  [[nodiscard]] std::string error_path() const;
  [[nodiscard]] const std::vector<Passage>& passages() const noexcept { return passages_; }

  // For the engine, which queues the parts.
  [[nodiscard]] std::span<const std::shared_ptr<File>> files() const noexcept { return files_; }
  [[nodiscard]] std::span<Part> parts() noexcept { return parts_; }

  // For the threads of lanes.
  void fail(const Error& error) noexcept;  // The first one wins.
  void note_block(std::int32_t file, std::chrono::steady_clock::time_point issued_at,
                  std::chrono::steady_clock::time_point completed_at) noexcept;
  void finish_part() noexcept;

 private:
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

}  // namespace infinity::io
