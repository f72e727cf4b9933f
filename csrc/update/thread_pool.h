// Threads that wait for items of work, kept between calls: starting one costs more than a small
// update does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace infinity::update {

// Calls from several threads take turns. Threads are started when a call first asks for them and
// end with the pool.
class ThreadPool {
 public:
  ThreadPool() = default;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();

  // Calls body(0) ... body(num_items - 1), each once, in no order, on at most `num_threads` threads
  // of which the caller's is one; returns when all are done. `body` must not throw. When the system
  // gives fewer threads, fewer work.
  void run(std::size_t num_items, std::size_t num_threads,
           const std::function<void(std::size_t)>& body);

 private:
  // One call of run(). Workers hold a reference, so a late one finds no items and not a dead call.
  struct Call {
    const std::function<void(std::size_t)>* body = nullptr;
    std::size_t num_items = 0;
    std::size_t num_helpers_wanted = 0;  // Under mutex_.
    std::atomic<std::size_t> next{0};
    std::atomic<std::size_t> num_done{0};
  };

  void start_up_to(std::size_t num_workers);
  void work();
  bool take_items(Call& call);  // Whether this call finished the last one.

  std::mutex turn_;   // Held by the call in progress.
  std::mutex mutex_;  // Guards what follows.
  std::condition_variable has_work_;
  std::condition_variable is_done_;
  std::shared_ptr<Call> call_;
  bool is_closing_ = false;
  std::vector<std::thread> workers_;  // Changed under turn_ only.
};

// The pool of this process; a forked child gets one of its own.
[[nodiscard]] ThreadPool& process_pool();

}  // namespace infinity::update
