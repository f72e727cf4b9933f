#include "infinity_io/engine.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "infinity_io/probe.h"
#include "hooks.h"
#include "lane.h"

namespace infinity::io {

namespace {

// Where the kernel does not tell: a multiple of every logical block size in use.
constexpr std::uint32_t kDefaultAlignmentNbytes = 4096;

Error bad_file(Operation operation, std::int32_t file) noexcept {
  return {EBADF, operation, file, 0, 0, "no such open file in this engine"};
}

// Rows of statistics that closed files keep for themselves.
constexpr std::size_t kMaxClosedFiles = 64;

// Direct I/O would answer EINVAL without saying what for.
const char* misalignment(const Segment& segment, const File& file) noexcept {
  const std::uint32_t alignment = file.alignment_nbytes;
  if (segment.offset_nbytes % alignment != 0) return "the offset is not aligned for direct I/O";
  if (segment.nbytes % alignment != 0) return "the length is not aligned for direct I/O";
  if (segment.address % alignment != 0) return "the address is not aligned for direct I/O";
  return nullptr;
}

// Null when the range can be in a file and in memory. What begins in the arena also ends there.
const char* misplacement(const Segment& segment, const ArenaRange& arena) noexcept {
  constexpr std::uint64_t kLargestOffset = std::numeric_limits<std::int64_t>::max();
  if (segment.offset_nbytes > kLargestOffset ||
      segment.nbytes > kLargestOffset - segment.offset_nbytes) {
    return "the range ends beyond the largest offset of a file";
  }
  if (segment.nbytes == 0) return nullptr;
  if (segment.address == 0) return "there is no memory at address 0";
  if (segment.nbytes > std::numeric_limits<std::uintptr_t>::max() - segment.address) {
    return "the memory ends beyond the largest address";
  }
  if (arena.holds(segment.address, 1) && !arena.holds(segment.address, segment.nbytes)) {
    return "the memory begins in the arena and ends behind it";
  }
  return nullptr;
}

}  // namespace

Engine::Engine(const Options& options, std::shared_ptr<const Hooks> hooks)
    : options_(options), hooks_(std::move(hooks)), pid_(getpid()) {}

Result<std::unique_ptr<Engine>> Engine::open(const Options& options) {
  return open(options, std::make_shared<const Hooks>());
}

Result<std::unique_ptr<Engine>> Engine::open(const Options& options,
                                             std::shared_ptr<const Hooks> hooks) {
  INF_ASSERT(options.block_nbytes > 0 && options.block_nbytes % kDefaultAlignmentNbytes == 0);
  INF_ASSERT(options.queue_depth > 0 && options.num_threads > 0 && options.max_pending > 0);
  INF_ASSERT(options.min_queue_depth <= options.queue_depth);
  INF_ASSERT(options.min_queue_depth == 0 || options.queue_depth <= options.max_queue_depth);
  if (options.backend == Backend::kUring) {
    // As large as one device will need: a smaller one says nothing of the memlock limit.
    const UringProbe probe = probe_uring(options.ring_flags, num_ring_entries(options));
    if (!probe.usable) {
      return Error{probe.code, Operation::kSetup, -1, 0, 0, probe.step};
    }
  }
  return std::unique_ptr<Engine>(
      new Engine(options, std::move(hooks)));  // NOLINT: the constructor is private.
}

Engine::~Engine() { close(); }

bool Engine::in_child() const noexcept { return getpid() != pid_; }

// `mutex_` must be held.
std::shared_ptr<File> Engine::find(std::int32_t id) const {
  const auto found = files_.find(id);
  return found != files_.end() && found->second->is_open ? found->second : nullptr;
}

// `mutex_` must be held.
Result<Lane*> Engine::lane_of(std::uint64_t device) {
  for (LaneEntry& entry : lanes_) {
    if (entry.device == device) return entry.lane.get();
  }
  std::unique_ptr<Lane> lane = options_.backend == Backend::kUring
                                   ? make_uring_lane(options_, hooks_, registered_arena_)
                                   : make_thread_lane(options_, hooks_);
  INF_ASSERT(lane != nullptr);  // open() has probed.
  if (const Error error = lane->start()) return error;
  lanes_.push_back({device, std::move(lane)});
  return lanes_.back().lane.get();
}

Result<std::int32_t> Engine::open_file(const std::string& path, bool direct, bool read_only) {
  std::lock_guard lock(mutex_);
  if (is_closed_) return Error{EBADF, Operation::kOpen, -1, 0, 0, "the engine is closed"};
  const int access = read_only ? O_RDONLY : O_RDWR;
  const int fd = ::open(path.c_str(), access | O_CLOEXEC | (direct ? O_DIRECT : 0));
  if (fd < 0) return Error{errno, Operation::kOpen};
  struct stat status {};
  if (fstat(fd, &status) != 0) {
    const Error error{errno, Operation::kOpen};
    ::close(fd);
    return error;
  }
  Result<Lane*> lane = lane_of(status.st_dev);
  if (!lane.ok()) {
    ::close(fd);
    return lane.error();
  }
  auto file = std::make_shared<File>();
  file->id = next_file_++;
  file->fd = fd;
  file->path = path;
  file->direct = direct;
  file->is_read_only = read_only;
  if (read_only) file->size_nbytes = static_cast<std::uint64_t>(status.st_size);
  if (direct) {
    const DirectAlignment asked = direct_alignment(fd);
    const std::uint32_t strictest = std::max(asked.memory_nbytes, asked.offset_nbytes);
    file->alignment_nbytes = strictest == 0 ? kDefaultAlignmentNbytes : strictest;
  }
  file->lane = lane.value();
  file->is_open = true;
  files_.emplace(file->id, file);
  return file->id;
}

Error Engine::close_file(std::int32_t id) {
  std::shared_ptr<File> file;
  {
    std::lock_guard lock(mutex_);
    file = find(id);
    if (file == nullptr) return bad_file(Operation::kClose, id);
    file->is_open = false;  // From here on find() does not see it.
  }
  file->lane->wait_file_idle(*file);
  file->lane->forget(file.get());
  const int fd = std::exchange(file->fd, -1);
  {
    std::lock_guard lock(mutex_);
    forget(*file);
    files_.erase(id);
  }
  return ::close(fd) == 0 ? Error{} : Error{errno, Operation::kClose, id};
}

// Keeps what a file has seen, by path, and of many files together: opening and closing files for
// ever takes no more memory. `mutex_` must be held.
void Engine::forget(const File& file) {
  const FileStats stats = file.lane->stats_of(file);
  const auto same_path = [&file](const FileReport& report) { return report.path == file.path; };
  auto found = std::find_if(closed_files_.begin(), closed_files_.end(), same_path);
  if (found == closed_files_.end() && closed_files_.size() > kMaxClosedFiles) --found;
  if (found == closed_files_.end()) {
    const bool is_last = closed_files_.size() == kMaxClosedFiles;
    closed_files_.push_back({file.id, is_last ? "other files" : file.path, false, stats});
  } else {
    found->id = file.id;
    found->stats += stats;
  }
}

Result<std::uint32_t> Engine::alignment_nbytes(std::int32_t id) const {
  std::lock_guard lock(mutex_);
  const std::shared_ptr<File> file = find(id);
  if (file == nullptr) return bad_file(Operation::kOpen, id);
  return file->alignment_nbytes;
}

// The files that the segments name, each once.
Error Engine::collect(Operation operation, std::span<const Segment> segments, Files& files) const {
  std::lock_guard lock(mutex_);
  for (const Segment& segment : segments) {
    if (find_in(files, segment.file) != nullptr) continue;
    std::shared_ptr<File> file = find(segment.file);
    if (file == nullptr) return bad_file(operation, segment.file);
    files.push_back(std::move(file));
  }
  return {};
}

// What the kernel would refuse without saying what for, or take and write elsewhere.
Error Engine::check(Operation operation, std::span<const Segment> segments,
                    const Files& files) const {
  for (const Segment& segment : segments) {
    const File& file = *find_in(files, segment.file);
    const char* detail = misplacement(segment, options_.arena);
    if (detail == nullptr) detail = misalignment(segment, file);
    if (detail == nullptr && file.is_read_only && operation == Operation::kWrite) {
      detail = "the file was opened for reading";
    }
    if (detail == nullptr) continue;
    return {EINVAL, operation, segment.file, segment.offset_nbytes, segment.nbytes, detail};
  }
  return {};
}

// Queues all parts, or none: then the lane that is full. Null when all are queued.
Result<Lane*> Engine::enqueue(const std::shared_ptr<QueuedRequest>& request, Operation operation,
                              Priority priority) {
  std::lock_guard lock(mutex_);  // Until all is queued: close_file() then waits for it.
  for (const auto& file : request->files()) {
    if (!file->is_open) return bad_file(operation, file->id);
  }
  for (const Part& part : request->parts()) {
    Lane* lane = part.files.front()->lane;
    if (!lane->has_room(priority)) return lane;
  }
  for (Part& part : request->parts()) {
    part.owner = request;
    part.files.front()->lane->enqueue(&part);
  }
  return nullptr;
}

Result<Ticket> Engine::submit(Operation operation, std::span<const Segment> segments,
                              Priority priority, std::chrono::nanoseconds timeout) {
  INF_ASSERT(operation == Operation::kRead || operation == Operation::kWrite);
  INF_ASSERT(static_cast<std::size_t>(priority) < kNumPriorities);
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  Files files;
  if (const Error error = collect(operation, segments, files)) return error;
  if (const Error error = check(operation, segments, files)) return error;
  // Built once, and outside the lock: it sorts and allocates. A file that is closed meanwhile is
  // kept alive by `files`, and found closed by enqueue().
  const auto request = QueuedRequest::build(operation, segments, priority, files);
  while (true) {
    Result<Lane*> full = enqueue(request, operation, priority);
    if (!full.ok()) return full.error();
    if (full.value() == nullptr) return std::make_shared<Request>(request);
    if (!full.value()->wait_for_room(priority, deadline)) {
      return Error{EAGAIN, operation, -1, 0, 0, "the queue of the device is full"};
    }
  }
}

Error Engine::sync(std::int32_t id) {
  std::shared_ptr<File> file;
  {
    std::lock_guard lock(mutex_);
    file = find(id);
  }
  if (file == nullptr) return bad_file(Operation::kSync, id);
  while (fdatasync(file->fd) != 0) {
    if (errno != EINTR) return {errno, Operation::kSync, id};
  }
  return {};
}

bool Engine::drain(std::chrono::nanoseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::vector<Lane*> lanes;
  {
    std::lock_guard lock(mutex_);
    for (LaneEntry& entry : lanes_) lanes.push_back(entry.lane.get());
  }
  return std::all_of(lanes.begin(), lanes.end(),
                     [&](Lane* lane) { return lane->wait_idle(deadline); });
}

void Engine::close() {
  std::vector<LaneEntry> lanes;
  {
    std::lock_guard lock(mutex_);
    is_closed_ = true;
    lanes.swap(lanes_);
  }
  for (LaneEntry& entry : lanes) {
    while (!entry.lane->wait_idle(std::chrono::steady_clock::now() + std::chrono::hours(1))) {
    }
    entry.lane->stop();
  }
  std::lock_guard lock(mutex_);
  for (const auto& [id, file] : files_) {
    if (file->fd >= 0) ::close(file->fd);
    file->fd = -1;
    file->is_open = false;
    forget(*file);
    file->lane = nullptr;
  }
  files_.clear();
  registered_arena_.reset();
  for (const LaneEntry& entry : lanes) {
    ended_lanes_.push_back(entry.lane->info());
    ended_lanes_.back().device = entry.device;
  }
}

std::vector<FileReport> Engine::stats() const {
  std::lock_guard lock(mutex_);
  std::vector<FileReport> reports = closed_files_;
  for (const auto& [id, file] : files_) {
    reports.push_back({id, file->path, file->is_open, file->lane->stats_of(*file)});
  }
  return reports;
}

std::vector<LaneInfo> Engine::lanes() const {
  std::lock_guard lock(mutex_);
  std::vector<LaneInfo> infos = ended_lanes_;
  for (const LaneEntry& entry : lanes_) {
    infos.push_back(entry.lane->info());
    infos.back().device = entry.device;
  }
  return infos;
}

}  // namespace infinity::io
