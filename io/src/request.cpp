#include "infinity_io/request.h"

namespace infinity::io {

bool Request::wait_for(std::chrono::nanoseconds timeout) noexcept {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  return finished_.wait_for(lock, timeout, [this] { return done(); });
}

Error Request::error() const noexcept {
  std::lock_guard lock(mutex_);
  return error_;
}

std::string Request::error_path() const {
  const Error failure = error();
  for (const auto& file : files_) {
    if (file->id == failure.file) return file->path;
  }
  return {};
}

void Request::fail(const Error& error) noexcept {
  std::lock_guard lock(mutex_);
  if (error_.code == 0) error_ = error;
  failed_.store(true, std::memory_order_release);
}

void Request::finish_part() noexcept {
  if (num_parts_left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  std::lock_guard lock(mutex_);
  done_.store(true, std::memory_order_release);
  finished_.notify_all();
}

}  // namespace infinity::io
