#include "queued_request.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "lane.h"
#include "order.h"

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

File* find_in(std::span<const std::shared_ptr<File>> files, std::int32_t id) noexcept {
  const auto found =
      std::find_if(files.begin(), files.end(), [id](const auto& file) { return file->id == id; });
  return found == files.end() ? nullptr : found->get();
}

namespace {

// Whether `next` goes on where `segment` ends, in the file and in memory.
bool continues(const Segment& segment, const Segment& next) noexcept {
  return next.file == segment.file &&
         next.offset_nbytes == segment.offset_nbytes + segment.nbytes &&
         next.address == segment.address + segment.nbytes;
}

}  // namespace

std::shared_ptr<QueuedRequest> QueuedRequest::build(Operation operation,
                                                    std::span<const Segment> segments,
                                                    Priority priority,
                                                    std::span<const std::shared_ptr<File>> files) {
  auto request = std::make_shared<QueuedRequest>();
  // In the order of the file, where neighbours share a block.
  std::vector<Segment> sorted(segments.begin(), segments.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const Segment& a, const Segment& b) {
    return std::tie(a.file, a.offset_nbytes) < std::tie(b.file, b.offset_nbytes);
  });
  for (const Segment& segment : sorted) {
    if (segment.nbytes == 0) continue;
    request->add(segment, find_in(files, segment.file), operation, priority);
  }
  for (const auto& file : files) {
    std::uint64_t nbytes = 0;
    for (const Part& part : request->parts_) {
      for (const Segment& segment : part.segments) {
        if (segment.file == file->id) nbytes += segment.nbytes;
      }
    }
    if (nbytes == 0) continue;
    request->files_.push_back(file);
    request->passages_.push_back({file->id, nbytes});
  }
  for (Part& part : request->parts_) part.ranges = covered_ranges(part.segments);
  request->num_parts_left_ = request->parts_.size();
  if (request->parts_.empty()) request->done_ = true;
  return request;
}

// To the part of the file's device; what goes on where the last segment ends makes that longer.
void QueuedRequest::add(const Segment& segment, File* file, Operation operation,
                        Priority priority) {
  auto part = std::find_if(parts_.begin(), parts_.end(), [file](const Part& each) {
    return each.files.front()->lane == file->lane;
  });
  if (part == parts_.end()) {
    parts_.emplace_back();
    part = parts_.end() - 1;
    part->operation = operation;
    part->submitted_as = part->priority = priority;
  }
  if (!part->segments.empty() && continues(part->segments.back(), segment)) {
    part->segments.back().nbytes += segment.nbytes;
    return;
  }
  part->segments.push_back(segment);
  part->files.push_back(file);
}

bool QueuedRequest::wait_for(std::chrono::nanoseconds timeout) noexcept {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  return finished_.wait_for(lock, timeout, [this] { return done(); });
}

bool QueuedRequest::cancel() noexcept {
  bool has_dropped = false;
  for (Part& part : parts_) {
    if (done()) break;  // Its files, and their lanes, may be gone.
    has_dropped |= part.files.front()->lane->cancel(&part);
  }
  return has_dropped;
}

Error QueuedRequest::error() const noexcept {
  std::lock_guard lock(mutex_);
  return error_;
}

std::string QueuedRequest::error_path() const {
  const Error failure = error();
  for (const auto& file : files_) {
    if (file->id == failure.file) return file->path;
  }
  return {};
}

void QueuedRequest::fail(const Error& error) noexcept {
  std::lock_guard lock(mutex_);
  if (error_.code == 0) error_ = error;
  failed_.store(true, std::memory_order_release);
}

void QueuedRequest::note_block(std::int32_t file, std::chrono::steady_clock::time_point issued_at,
                         std::chrono::steady_clock::time_point completed_at) noexcept {
  for (Passage& passage : passages_) {
    if (passage.file != file) continue;
    if (!passage.has_moved() || issued_at < passage.issued_at) passage.issued_at = issued_at;
    passage.completed_at = std::max(passage.completed_at, completed_at);
    return;
  }
}

void QueuedRequest::finish_part() noexcept {
  // INV-3: the last part completes the request, once.
  if (num_parts_left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  std::lock_guard lock(mutex_);
  done_.store(true, std::memory_order_release);
  finished_.notify_all();
}

Request::Request(std::shared_ptr<QueuedRequest> queued) noexcept : queued_(std::move(queued)) {}

bool Request::done() const noexcept { return queued_->done(); }

bool Request::failed() const noexcept { return queued_->failed(); }

bool Request::wait_for(std::chrono::nanoseconds timeout) noexcept {
  return queued_->wait_for(timeout);
}

bool Request::cancel() noexcept { return queued_->cancel(); }

Error Request::error() const noexcept { return queued_->error(); }

std::string Request::error_path() const { return queued_->error_path(); }

const std::vector<Passage>& Request::passages() const noexcept { return queued_->passages(); }

}  // namespace infinity::io
