// Asynchronous file I/O in large blocks: the public face of the library.
//
// A request (segments, one ticket) is cut into blocks, and small requests that go on where another
// ends are gathered into one; each device has a lane that keeps at most
// `queue_depth` blocks in flight (up to `max_queue_depth` where the drive answers faster then, see
// io/src/depth_control.h), or as many bytes in smaller ones, most urgent first. Two kinds of
// lane, io_uring and threads, share everything but the system calls.
//
// Order: requests that overlap in a file, one of them writing, are carried out as they were
// submitted; the earlier one inherits the urgency of the later. All others go in any order, and so
// do the segments of one request among themselves.
//
// Threads: every method may be called from any thread; close() and the destructor only when no
// other call is running. Nothing here may be used in a forked child except in_child() and leaking
// the object: the lane threads do not exist there.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include <sys/types.h>

#include "infinity_io/probe.h"
#include "infinity_io/request.h"
#include "infinity_io/status.h"

namespace infinity::io {

struct Hooks;
struct File;
class Lane;
class RegisteredArena;

enum class Backend : std::uint8_t { kThreads, kUring };

inline constexpr std::uint32_t kMaxBlockNbytes = std::uint32_t{1} << 30;

struct Options {
  Backend backend = Backend::kThreads;
  RingFlags ring_flags = RingFlags::kAuto;
  ArenaRange arena;
  std::uint32_t block_nbytes = 4U << 20;
  std::uint32_t queue_depth = 4;      // blocks in flight per device, at first
  std::uint32_t min_queue_depth = 0;  // 0: always `queue_depth`; else found while the drive works,
  std::uint32_t max_queue_depth = 0;  // from `min_queue_depth` to `max_queue_depth`
  std::uint32_t num_threads = 4;      // per device, thread backend only
  std::uint32_t max_pending = 1024;   // unfinished requests per device and priority
};

// What one lane has seen. Times of threads and waiters add up.
struct LaneStats {
  std::uint64_t num_pending = 0;      // requests, now
  std::uint32_t num_in_flight = 0;    // blocks, now
  std::uint32_t queue_depth = 0;      // blocks that may be in flight, now
  std::uint64_t num_cancelled = 0;    // requests
  std::chrono::nanoseconds cpu{0};    // of the lane's threads
  std::chrono::nanoseconds stall{0};  // that submitters stood still because the queue was full
  Histogram queue_wait;               // of requests, from submit() to the issue of the first block
};

// What the set-up of one lane found out, and its statistics.
struct LaneInfo {
  std::uint64_t device = 0;
  std::uint32_t ring_flags = 0;  // what the kernel granted
  bool has_registered_buffers = false;
  bool has_registered_files = false;
  bool has_fixed_vectors = false;  // registered buffers also for blocks of several pieces
  int register_buffers_errno = 0;
  LaneStats stats;
};

struct FileReport {
  std::int32_t id = -1;
  std::string path;
  bool is_open = false;
  FileStats stats;
};

class Engine {
 public:
  static Result<std::unique_ptr<Engine>> open(const Options& options);

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  // Opens an existing file, for reading and writing or for reading alone. The id is never reused.
  Result<std::int32_t> open_file(const std::string& path, bool direct, bool read_only = false);

  // Waits until nothing of the file is queued or in flight, then closes it.
  Error close_file(std::int32_t file);

  // Alignment that offsets, lengths and addresses of `file` must keep; 1 when it is buffered.
  Result<std::uint32_t> alignment_nbytes(std::int32_t file) const;

  // Queues a request; waits at most `timeout` for a device that has `max_pending` unfinished
  // requests of this priority, then answers EAGAIN. The other priorities are not held up.
  Result<Ticket> submit(Operation operation, std::span<const Segment> segments, Priority priority,
                        std::chrono::nanoseconds timeout = std::chrono::hours(24));

  // fdatasync on the calling thread. Says nothing about requests that are not done yet.
  Error sync(std::int32_t file);

  // Waits until nothing is queued or in flight, at most `timeout`. Returns whether that is so.
  [[nodiscard]] bool drain(std::chrono::nanoseconds timeout);

  // Drains, ends the threads, closes the files. Idempotent.
  void close();

  // One per open file, and one per path of the closed ones.
  [[nodiscard]] std::vector<FileReport> stats() const;
  [[nodiscard]] std::vector<LaneInfo> lanes() const;
  [[nodiscard]] bool in_child() const noexcept;

 private:
  friend struct EngineForTests;

  // Of the segments of one request: each file once.
  using Files = std::vector<std::shared_ptr<File>>;

  struct LaneEntry {
    std::uint64_t device = 0;
    std::unique_ptr<Lane> lane;
  };

  Engine(const Options& options, std::shared_ptr<const Hooks> hooks);
  static Result<std::unique_ptr<Engine>> open(const Options& options,
                                              std::shared_ptr<const Hooks> hooks);
  [[nodiscard]] std::shared_ptr<File> find(std::int32_t id) const;  // null when not open
  Result<Lane*> lane_of(std::uint64_t device);
  Error collect(Operation operation, std::span<const Segment> segments, Files& files) const;
  Error check(Operation operation, std::span<const Segment> segments, const Files& files) const;
  Result<Lane*> enqueue(const std::shared_ptr<QueuedRequest>& request, Operation operation,
                        Priority priority);
  void forget(const File& file);

  const Options options_;
  const std::shared_ptr<const Hooks> hooks_;
  const pid_t pid_;
  mutable std::mutex mutex_;                             // guards all below
  std::map<std::int32_t, std::shared_ptr<File>> files_;  // open, by id
  std::int32_t next_file_ = 0;
  std::vector<FileReport> closed_files_;
  std::shared_ptr<RegisteredArena> registered_arena_;  // of all lanes with rings
  std::vector<LaneEntry> lanes_;
  std::vector<LaneInfo> ended_lanes_;
  bool is_closed_ = false;
};

}  // namespace infinity::io
