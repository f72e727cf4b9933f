#include "infinity_io/request.h"

#include <algorithm>

#include "lane.h"

namespace infinity::io {

FileStats& FileStats::operator+=(const FileStats& other) noexcept {
  read_nbytes += other.read_nbytes;
  write_nbytes += other.write_nbytes;
  num_reads += other.num_reads;
  num_writes += other.num_writes;
  num_retries += other.num_retries;
  num_short_transfers += other.num_short_transfers;
  num_errors += other.num_errors;
  max_in_flight = std::max(max_in_flight, other.max_in_flight);
  busy += other.busy;
  in_flight += other.in_flight;
  read_latency += other.read_latency;
  write_latency += other.write_latency;
  return *this;
}

bool Request::wait_for(std::chrono::nanoseconds timeout) noexcept {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  return finished_.wait_for(lock, timeout, [this] { return done(); });
}

bool Request::cancel() noexcept {
  bool has_dropped = false;
  for (Part& part : parts_) {
    if (done()) break;  // Its files, and their lanes, may be gone.
    has_dropped |= part.files.front()->lane->cancel(&part);
  }
  return has_dropped;
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

void Request::note_block(std::int32_t file, std::chrono::steady_clock::time_point issued_at,
                         std::chrono::steady_clock::time_point completed_at) noexcept {
  for (Passage& passage : passages_) {
    if (passage.file != file) continue;
    if (!passage.has_moved() || issued_at < passage.issued_at) passage.issued_at = issued_at;
    passage.completed_at = std::max(passage.completed_at, completed_at);
    return;
  }
}

void Request::finish_part() noexcept {
  if (num_parts_left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  std::lock_guard lock(mutex_);
  done_.store(true, std::memory_order_release);
  finished_.notify_all();
}

}  // namespace infinity::io
