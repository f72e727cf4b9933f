// One device: its queue, what is in flight on it, and the book-keeping that both backends share.
//
// Locking: `mutex_` guards the queue, the parts, the counters of files, and is taken before a
// request's own mutex. It is held for microseconds; blocks take milliseconds.
//
// The window is counted in bytes: so many blocks of full size (DepthControl finds the number), or as many more small ones as
// weigh the same. So small extents are batched, and the wait of an urgent block behind what is in
// flight, the only thing that cannot be reordered, is the same for both.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "infinity_io/engine.h"
#include "block.h"
#include "block_queue.h"
#include "depth_control.h"
#include "hooks.h"

namespace infinity::io {

class RegisteredArena;

// The limit of blocks of full size in flight.
[[nodiscard]] std::uint32_t max_depth(const Options& options) noexcept;

// Blocks that one device may have in flight at once, however small.
[[nodiscard]] std::uint32_t max_in_flight(const Options& options) noexcept;

// Entries of a ring: one per block, one for the wake-up, rounded to a power of two.
[[nodiscard]] std::uint32_t num_ring_entries(const Options& options) noexcept;

class Lane {
 public:
  using Clock = std::chrono::steady_clock;

  Lane(const Options& options, std::shared_ptr<const Hooks> hooks);
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  virtual ~Lane() = default;

  // Starts the threads; call once. stop() must follow a start() that succeeded.
  virtual Error start() = 0;

  // Ends the threads. The lane must be idle.
  virtual void stop() noexcept = 0;

  // Makes the lane forget a file of which nothing is queued or in flight.
  virtual void forget(File* file) noexcept = 0;

  [[nodiscard]] LaneInfo info() const noexcept;
  [[nodiscard]] FileStats stats_of(const File& file) const noexcept;

  // Whether a part of this class may be enqueued. Only enqueue() can make the answer worse.
  [[nodiscard]] bool has_room(Priority priority) const noexcept;
  [[nodiscard]] bool wait_for_room(Priority priority, Clock::time_point deadline) noexcept;

  void enqueue(Part* part) noexcept;

  // Drops what has not been issued of a part. Returns whether that was anything.
  bool cancel(Part* part) noexcept;

  [[nodiscard]] bool wait_idle(Clock::time_point deadline) noexcept;
  void wait_file_idle(const File& file) noexcept;

 protected:
  // Tells a sleeping thread that the queue is not empty. Called with `mutex_` held.
  virtual void wake() noexcept = 0;

  // Processor time that the lane's threads have used. The kernel's own workers are not in it.
  [[nodiscard]] virtual std::chrono::nanoseconds cpu() const noexcept = 0;

  // Takes the next block, if there is one and the window has room for it; it is in flight from here
  // on. Small requests that are next in the queue and go on where it ends travel with it. `mutex_`
  // must be held.
  [[nodiscard]] bool take(Block& block) noexcept;

  // Whether nothing more fits the window. `mutex_` must be held.
  [[nodiscard]] bool is_full() const noexcept { return num_in_flight_nbytes_ >= window_nbytes(); }

  // Books the kernel's answer. kAgain: issue the block, which was moved on, once more. Otherwise
  // the block is gone, and each of its requests with it if that was its last. Requests that shared
  // a block that failed are queued again, each to get an answer of its own.
  [[nodiscard]] Verdict settle(Block& block, std::int64_t result) noexcept;

  // Fails everything queued, now and later: the lane can do no more work. `mutex_` must be held.
  void die(int code, const char* detail) noexcept;

  // `mutex_` must be held.
  [[nodiscard]] std::uint64_t window_nbytes() const noexcept {
    return std::uint64_t{depth()} * options_.block_nbytes;
  }

  const Options options_;
  const std::shared_ptr<const Hooks> hooks_;
  mutable std::mutex mutex_;
  LaneInfo info_;
  BlockQueue queue_;
  bool is_stopping_ = false;

 private:
  [[nodiscard]] std::uint32_t& num_pending(Priority priority) noexcept {
    return num_pending_[static_cast<std::size_t>(priority)];
  }

  // Work of one kind at one depth, while more was queued than the window let through.
  struct Epoch {
    Clock::time_point begun_at{};
    std::uint64_t skipped_nbytes = 0;  // of blocks that were issued before it
    std::uint64_t read_nbytes = 0;
    std::uint64_t write_nbytes = 0;
  };
  enum class Work : std::uint8_t { kRead, kWrite, kMixed };
  static constexpr std::size_t kNumWorks = 3;

  [[nodiscard]] std::uint32_t depth() const noexcept {
    return controls_[static_cast<std::size_t>(work_)].depth();
  }
  void measure(bool is_read, std::uint64_t nbytes, Clock::time_point now) noexcept;
  void end_epoch(Clock::time_point now) noexcept;

  void gather(Block& block) noexcept;
  void start(Part& part, Block& block) noexcept;
  void take_apart(Block& block) noexcept;
  void retire(Block& block, std::uint64_t nbytes) noexcept;
  void drop_rest(Part* part) noexcept;
  void finish(Part* part) noexcept;
  void push(Part* part) noexcept;
  void raise(Part* part, Priority priority) noexcept;

  std::vector<Part*> parts_;  // unfinished: waiting for a conflict, queued or in flight
  std::array<std::uint32_t, kNumPriorities> num_pending_{};  // unfinished, by class submitted in
  std::uint32_t num_in_flight_ = 0;
  std::uint64_t num_in_flight_nbytes_ = 0;
  std::array<DepthControl, kNumWorks> controls_;  // by `Work`
  Work work_ = Work::kMixed;                      // of the last epoch
  Epoch epoch_;
  std::condition_variable changed_;  // a part has finished
  int death_code_ = 0;
  const char* death_detail_ = nullptr;
};

[[nodiscard]] std::unique_ptr<Lane> make_thread_lane(const Options& options,
                                                     std::shared_ptr<const Hooks> hooks);
// Null when it was not built. All lanes of an engine share `arena`, which the first one makes.
[[nodiscard]] std::unique_ptr<Lane> make_uring_lane(const Options& options,
                                                    std::shared_ptr<const Hooks> hooks,
                                                    std::shared_ptr<RegisteredArena>& arena);

}  // namespace infinity::io
