// A thread that reports failure instead of throwing, leaves signals to the main program, and knows
// what processor time it has used.
#pragma once

#include <atomic>
#include <chrono>

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "infinity_io/status.h"

namespace infinity::io {

class Thread {
 public:
  Thread() = default;
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;
  ~Thread() { INF_ASSERT(!is_running_); }

  // Runs `body(argument)`. Returns 0 or the errno.
  [[nodiscard]] int start(void (*body)(void*), void* argument, const char* name) noexcept {
    body_ = body;
    argument_ = argument;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // Inherited: Ctrl-C is the main thread's.
    const int code = pthread_create(&handle_, nullptr, &Thread::run, this);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (code == 0) pthread_setname_np(handle_, name);
    is_running_ = code == 0;
    return code;
  }

  void join() noexcept {
    if (!is_running_) return;
    pthread_join(handle_, nullptr);
    is_running_ = false;
  }

  // Processor time used so far. Not while another thread calls start() or join().
  [[nodiscard]] std::chrono::nanoseconds cpu() const noexcept {
    clockid_t clock;
    const std::int64_t final_ns = final_cpu_ns_.load();
    if (!is_running_ || final_ns != 0 || pthread_getcpuclockid(handle_, &clock) != 0) {
      return std::chrono::nanoseconds(final_ns);
    }
    const std::int64_t ns = read_ns(clock);  // 0 when it ended this moment.
    return std::chrono::nanoseconds(ns != 0 ? ns : final_cpu_ns_.load());
  }

 private:
  static void* run(void* self) noexcept {
    Thread& thread = *static_cast<Thread*>(self);
    thread.body_(thread.argument_);
    thread.final_cpu_ns_ = read_ns(CLOCK_THREAD_CPUTIME_ID);
    return nullptr;
  }

  static std::int64_t read_ns(clockid_t clock) noexcept {
    timespec used{};
    if (clock_gettime(clock, &used) != 0) return 0;
    return std::int64_t{used.tv_sec} * 1'000'000'000 + used.tv_nsec;
  }

  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  pthread_t handle_{};
  bool is_running_ = false;
  std::atomic<std::int64_t> final_cpu_ns_{0};
};

}  // namespace infinity::io
