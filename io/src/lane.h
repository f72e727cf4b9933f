// One device: its queue, what is in flight on it, and the book-keeping that both backends share.
//
// Locking: `mutex_` guards the queue, the counters of parts and files, and is taken before a
// request's own mutex. It is held for microseconds; blocks take milliseconds.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "infinity_io/block.h"
#include "infinity_io/block_queue.h"
#include "infinity_io/engine.h"

namespace infinity::io {

class Lane {
 public:
  explicit Lane(const Options& options) : options_(options) {}
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

  void enqueue(Part* part) noexcept;
  [[nodiscard]] bool wait_idle(std::chrono::steady_clock::time_point deadline) noexcept;
  void wait_file_idle(const File& file) noexcept;

 protected:
  // Tells a sleeping thread that the queue is not empty. Called with `mutex_` held.
  virtual void wake() noexcept = 0;

  // Takes the next block, if there is one; it is in flight from here on. `mutex_` must be held.
  [[nodiscard]] bool take(Block& block) noexcept;

  // Books the kernel's answer. kAgain: issue the block, which was moved on, once more. Otherwise
  // the block is gone, and its request with it if that was its last.
  [[nodiscard]] Verdict settle(Block& block, std::int64_t result) noexcept;

  // Fails everything queued, now and later: the lane can do no more work. `mutex_` must be held.
  void die(int code, const char* detail) noexcept;

  const Options options_;
  mutable std::mutex mutex_;
  LaneInfo info_;
  BlockQueue queue_;
  bool is_stopping_ = false;

 private:
  void retire(Block& block) noexcept;
  void finish(Part* part) noexcept;
  [[nodiscard]] bool is_idle() const noexcept { return num_parts_ == 0; }

  std::uint64_t num_parts_ = 0;  // queued or in flight
  std::condition_variable changed_;  // a part has finished
  int death_code_ = 0;
  const char* death_detail_ = nullptr;
};

[[nodiscard]] std::unique_ptr<Lane> make_thread_lane(const Options& options);
[[nodiscard]] std::unique_ptr<Lane> make_uring_lane(const Options& options);  // null: not built

}  // namespace infinity::io
