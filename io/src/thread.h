// A thread that reports failure instead of throwing, and leaves signals to the main program.
#pragma once

#include <pthread.h>
#include <signal.h>

#include "infinity_io/status.h"

namespace infinity::io {

class Thread {
 public:
  Thread() = default;
  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;
  Thread(Thread&& other) noexcept : handle_(other.handle_), is_running_(other.is_running_) {
    other.is_running_ = false;
  }
  Thread& operator=(Thread&&) = delete;
  ~Thread() { INF_ASSERT(!is_running_); }

  // Runs `body(argument)`. Returns 0 or the errno.
  [[nodiscard]] int start(void* (*body)(void*), void* argument, const char* name) noexcept {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // Inherited: Ctrl-C is the main thread's.
    const int code = pthread_create(&handle_, nullptr, body, argument);
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

 private:
  pthread_t handle_{};
  bool is_running_ = false;
};

}  // namespace infinity::io
