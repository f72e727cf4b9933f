// One ring, owned by one thread.
//
// The thread sleeps in io_uring_enter. New work wakes it through an eventfd on which a poll is
// armed; while the window is full it needs no waking, since the next completion does it. Only its
// thread touches the ring (SINGLE_ISSUER); others speak to it through the queue and `forgotten_`.
#include <algorithm>
#include <cerrno>
#include <ctime>
#include <memory>
#include <vector>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "lane.h"
#include "registered_arena.h"
#include "ring.h"
#include "thread.h"

namespace infinity::io {

namespace {

constexpr std::uint64_t kWakeToken = ~std::uint64_t{0};
constexpr unsigned kNumFileSlots = 64;
constexpr unsigned kMaxWorkers = 4;  // of the kernel's own pool, for what it must punt

struct Slot {
  Block block;
  std::uint32_t generation = 0;  // A stale completion trips an assert instead of hurting bytes.
  bool is_busy = false;
};

class UringLane final : public Lane {
 public:
  UringLane(const Options& options, std::shared_ptr<const Hooks> hooks,
            std::shared_ptr<RegisteredArena> arena)
      : Lane(options, std::move(hooks)),
        arena_(std::move(arena)),
        slots_(max_in_flight(options)),
        file_slots_(kNumFileSlots, nullptr) {
    free_slots_.reserve(slots_.size());
    for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) free_slots_.push_back(slot);
  }

  Error start() override {
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) return {errno, Operation::kSetup, -1, 0, 0, "cannot create an eventfd"};
    if (const int code = thread_.start(&UringLane::body, this, "infinity-uring")) {
      ::close(wake_fd_);
      return {code, Operation::kSetup, -1, 0, 0, "cannot start the ring's thread"};
    }
    std::unique_lock lock(mutex_);
    answered_.wait(lock, [this] { return is_answered_; });
    if (setup_code_ == 0) return {};
    lock.unlock();
    join();
    return {setup_code_,
            Operation::kSetup,
            -1,
            0,
            0,
            setup_code_ == ENOMEM
                ? "io_uring_setup refused the ring: the memlock limit is too low for one more. "
                  "Raise it with 'ulimit -l' or LimitMEMLOCK=, or set io.engine = \"threads\""
                : "io_uring_setup refused the ring"};
  }

  void stop() noexcept override {
    {
      std::lock_guard lock(mutex_);
      is_stopping_ = true;
      notify();
    }
    join();
  }

  void forget(File* file) noexcept override {
    std::unique_lock lock(mutex_);
    const auto is_free = [this] { return forgotten_ == nullptr || has_ended_; };
    answered_.wait(lock, is_free);  // Another file's turn.
    if (has_ended_) return;
    forgotten_ = file;
    notify();
    answered_.wait(lock, is_free);
  }

 private:
  void wake() noexcept override {
    if (is_asleep_) notify();
  }

  std::chrono::nanoseconds cpu() const noexcept override { return thread_.cpu(); }

  void join() noexcept {
    thread_.join();
    ::close(wake_fd_);
  }

  // `mutex_` must be held.
  void notify() noexcept {
    is_asleep_ = false;
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof one);
  }

  static void body(void* self) noexcept { static_cast<UringLane*>(self)->run(); }

  void run() noexcept {
    const int code = set_up();
    {
      std::lock_guard lock(mutex_);
      setup_code_ = code;
      is_answered_ = true;
      answered_.notify_all();
    }
    if (code != 0) return;
    while (fill()) {
      const int answer = io_uring_submit_and_wait(&ring_, num_to_await());
      if (answer < 0 && !is_passing(answer)) {
        break_down(-answer);
        break;
      }
      if (reap() == 0 && answer == -EAGAIN) back_off();
    }
    tear_down();
  }

  // While the window is full of small blocks, a quarter of them is replaced at a time: fewer system
  // calls, and neighbours that are submitted together become one command of the device.
  [[nodiscard]] unsigned num_to_await() const noexcept {
    const std::size_t num_in_flight = slots_.size() - free_slots_.size();
    return is_window_full_ ? static_cast<unsigned>(std::max<std::size_t>(1, num_in_flight / 4)) : 1;
  }

  [[nodiscard]] int set_up() noexcept {
    const unsigned num_entries = num_ring_entries(options_);
    std::uint32_t flags = 0;
    if (const int code = set_up_ring(ring_, num_entries, options_.ring_flags, flags)) return code;
    has_ring_ = true;
    io_uring_ring_dontfork(&ring_);
    unsigned workers[2] = {kMaxWorkers, kMaxWorkers};
    io_uring_register_iowq_max_workers(&ring_, workers);
    const int code = arena_->give(ring_);
    has_buffers_ = options_.arena.nbytes != 0 && code == 0;
    has_fixed_vectors_ = has_buffers_ && has_fixed_vector_opcodes();
    const std::vector<int> none(kNumFileSlots, -1);
    has_files_ = io_uring_register_files(&ring_, none.data(), kNumFileSlots) == 0;
    std::lock_guard lock(mutex_);
    info_.ring_flags = flags;
    info_.register_buffers_errno = code;
    info_.has_registered_buffers = has_buffers_;
    info_.has_registered_files = has_files_;
    info_.has_fixed_vectors = has_fixed_vectors_;
    return 0;
  }

  [[nodiscard]] bool has_fixed_vector_opcodes() noexcept {
    io_uring_probe* opcodes = io_uring_get_probe_ring(&ring_);
    if (opcodes == nullptr) return false;
    const bool has_both = io_uring_opcode_supported(opcodes, kReadVectorFixed) != 0 &&
                          io_uring_opcode_supported(opcodes, kWriteVectorFixed) != 0;
    io_uring_free_probe(opcodes);
    return has_both;
  }

  // Moves queued blocks into the free slots. False when the thread has nothing left to live for.
  [[nodiscard]] bool fill() noexcept {
    std::lock_guard lock(mutex_);
    if (forgotten_ != nullptr) {
      release_file_slot(forgotten_);
      forgotten_ = nullptr;
      answered_.notify_all();
    }
    while (!free_slots_.empty()) {
      const std::uint32_t index = free_slots_.back();
      Slot& slot = slots_[index];
      if (!take(slot.block)) break;
      free_slots_.pop_back();
      slot.is_busy = true;
      prepare(index);
    }
    const bool is_unused = free_slots_.size() == slots_.size();
    if (is_stopping_ && is_unused) return false;
    if (!is_wake_armed_) arm_wake();
    is_window_full_ = free_slots_.empty() || is_full();
    is_asleep_ = !is_window_full_;
    return true;
  }

  void prepare(std::uint32_t index) noexcept {
    Slot& slot = slots_[index];
    const Block& block = slot.block;
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    INF_ASSERT(sqe != nullptr);  // The ring has more entries than there are slots.
    const int fd = block.file->fd;
    const bool is_read = block.operation == Operation::kRead;
    const iovec* pieces = block.pieces.data();
    const auto num_pieces = static_cast<unsigned>(block.pieces.size());
    const int buffer = has_buffers_ ? registered_buffer(block, options_.arena) : -1;
    if (num_pieces > 1) {
      is_read ? io_uring_prep_readv(sqe, fd, pieces, num_pieces, block.offset_nbytes)
              : io_uring_prep_writev(sqe, fd, pieces, num_pieces, block.offset_nbytes);
      if (buffer >= 0 && has_fixed_vectors_) {
        sqe->opcode = static_cast<std::uint8_t>(is_read ? kReadVectorFixed : kWriteVectorFixed);
        sqe->buf_index = static_cast<std::uint16_t>(buffer);
      }
    } else if (buffer >= 0) {
      is_read ? io_uring_prep_read_fixed(sqe, fd, pieces->iov_base, block.nbytes,
                                         block.offset_nbytes, buffer)
              : io_uring_prep_write_fixed(sqe, fd, pieces->iov_base, block.nbytes,
                                          block.offset_nbytes, buffer);
    } else {
      is_read ? io_uring_prep_read(sqe, fd, pieces->iov_base, block.nbytes, block.offset_nbytes)
              : io_uring_prep_write(sqe, fd, pieces->iov_base, block.nbytes, block.offset_nbytes);
    }
    if (const int file_slot = file_slot_of(block.file); file_slot >= 0) {
      sqe->fd = file_slot;
      sqe->flags |= IOSQE_FIXED_FILE;
    }
    if (block.num_retries > 0) sqe->flags |= IOSQE_ASYNC;  // It would only say EAGAIN again.
    ++slot.generation;
    sqe->user_data = std::uint64_t{slot.generation} << 32 | index;
  }

  void arm_wake() noexcept {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    INF_ASSERT(sqe != nullptr);
    io_uring_prep_poll_add(sqe, wake_fd_, POLLIN);
    sqe->user_data = kWakeToken;
    is_wake_armed_ = true;
  }

  // Registers the file at its first use. -1: no free slot, use the descriptor itself.
  [[nodiscard]] int file_slot_of(File* file) noexcept {
    if (!has_files_) return -1;
    auto slot = std::find(file_slots_.begin(), file_slots_.end(), file);
    if (slot == file_slots_.end()) {
      slot = std::find(file_slots_.begin(), file_slots_.end(), nullptr);
      if (slot == file_slots_.end()) return -1;
      const auto index = static_cast<unsigned>(slot - file_slots_.begin());
      if (io_uring_register_files_update(&ring_, index, &file->fd, 1) != 1) return -1;
      *slot = file;
    }
    return static_cast<int>(slot - file_slots_.begin());
  }

  void release_file_slot(File* file) noexcept {
    const auto slot = std::find(file_slots_.begin(), file_slots_.end(), file);
    if (slot == file_slots_.end()) return;
    const int none = -1;
    io_uring_register_files_update(&ring_, static_cast<unsigned>(slot - file_slots_.begin()), &none,
                                   1);
    *slot = nullptr;
  }

  // Returns the number of completions examined.
  unsigned reap() noexcept {
    unsigned head = 0, reaped = 0;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++reaped;
      if (cqe->user_data == kWakeToken) {
        std::uint64_t count = 0;
        [[maybe_unused]] const ssize_t got = read(wake_fd_, &count, sizeof count);
        is_wake_armed_ = false;
      } else {
        absorb(*cqe);
      }
    }
    io_uring_cq_advance(&ring_, reaped);
    return reaped;
  }

  void absorb(const io_uring_cqe& cqe) noexcept {
    const auto index = static_cast<std::uint32_t>(cqe.user_data);
    INF_ASSERT(index < slots_.size());
    Slot& slot = slots_[index];
    INF_ASSERT(slot.is_busy && slot.generation == static_cast<std::uint32_t>(cqe.user_data >> 32));
    if (settle(slot.block, cqe.res) == Verdict::kAgain) {
      prepare(index);
    } else {
      slot.is_busy = false;
      free_slots_.push_back(index);
    }
  }

  // Answers of io_uring_enter that pass when completions are reaped or by trying again.
  [[nodiscard]] static bool is_passing(int answer) noexcept {
    return answer == -EINTR || answer == -EAGAIN || answer == -EBUSY;
  }

  static void back_off() noexcept {
    const timespec one_ms{0, 1'000'000};
    nanosleep(&one_ms, nullptr);
  }

  // The ring itself failed (EBADR: a completion was lost). Its state is unknown, so nothing can be
  // awaited any more. The ring is closed first: the kernel then takes back what it has not begun.
  void break_down(int code) noexcept {
    const char* detail = "the ring failed; its completions are lost";
    tear_down();
    {
      std::lock_guard lock(mutex_);
      die(code, detail);  // First, so that nothing that comes back is queued again.
    }
    for (Slot& slot : slots_) {
      if (!slot.is_busy) continue;
      while (settle(slot.block, -code) == Verdict::kAgain) {
      }
      slot.is_busy = false;
    }
  }

  void tear_down() noexcept {
    if (!has_ring_) return;
    if (has_buffers_) io_uring_unregister_buffers(&ring_);  // Unpins now, not some time later.
    io_uring_queue_exit(&ring_);
    has_ring_ = false;
    std::lock_guard lock(mutex_);
    has_ended_ = true;
    forgotten_ = nullptr;
    answered_.notify_all();
  }

  const std::shared_ptr<RegisteredArena> arena_;

  // Shared with the callers, guarded by `mutex_`.
  int wake_fd_ = -1;
  std::condition_variable answered_;
  bool is_answered_ = false;
  bool is_asleep_ = false;
  bool has_ended_ = false;
  int setup_code_ = 0;
  File* forgotten_ = nullptr;
  Thread thread_;

  // The thread's own.
  io_uring ring_{};
  bool has_ring_ = false;
  bool has_buffers_ = false;
  bool has_files_ = false;
  bool has_fixed_vectors_ = false;
  bool is_wake_armed_ = false;
  bool is_window_full_ = false;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_slots_;
  std::vector<File*> file_slots_;
};

}  // namespace

std::unique_ptr<Lane> make_uring_lane(const Options& options, std::shared_ptr<const Hooks> hooks,
                                      std::shared_ptr<RegisteredArena>& arena) {
  if (arena == nullptr) arena = std::make_shared<RegisteredArena>(options.arena);
  return std::make_unique<UringLane>(options, std::move(hooks), arena);
}

}  // namespace infinity::io
