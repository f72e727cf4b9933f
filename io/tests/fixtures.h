// Memory, files and engines for the tests of whole engines.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "hooks.h"
#include "infinity_io/engine.h"
#include "infinity_io/probe.h"

namespace fixtures {

using namespace infinity::io;
using namespace std::chrono_literals;

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint32_t kBlockNbytes = 64 * kKiB;

// Of a hang, on the slowest machine under the slowest sanitizer.
constexpr std::chrono::seconds kTimeLimit{300};

// Page-aligned memory that is never registered unless asked.
class Memory {
 public:
  explicit Memory(std::size_t nbytes) : nbytes_(nbytes) {
    CHECK(nbytes % sizeof(std::uint64_t) == 0);
    bytes_ = static_cast<unsigned char*>(
        mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(bytes_ != MAP_FAILED);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { munmap(bytes_, nbytes_); }

  unsigned char& operator[](std::size_t index) { return bytes_[index]; }
  [[nodiscard]] std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(bytes_); }
  [[nodiscard]] ArenaRange range() const { return {address(), nbytes_}; }

  // Eight bytes at a time: under a sanitizer the bytes of a whole file one by one cost more than
  // what is tested.
  void fill(unsigned seed) {
    for (std::size_t at = 0; at < nbytes_; at += sizeof(std::uint64_t)) {
      const std::uint64_t word = (at + seed + 1) * 0x9E3779B97F4A7C15U;
      std::memcpy(bytes_ + at, &word, sizeof(word));
    }
  }

 private:
  unsigned char* bytes_ = nullptr;
  std::size_t nbytes_;
};

// A file of zeros in the working directory, gone at the end.
class TempFile {
 public:
  explicit TempFile(std::uint64_t nbytes) {
    std::strcpy(path_, "engine_test_XXXXXX");
    const int fd = mkstemp(path_);
    CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(nbytes)) == 0);
    close(fd);
  }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;
  ~TempFile() { unlink(path_); }
  [[nodiscard]] const char* path() const { return path_; }

 private:
  char path_[32];
};

struct TestOptions : Options {
  Tamper tamper;
};

inline TestOptions options_for(Backend backend) {
  TestOptions options;
  options.backend = backend;
  options.block_nbytes = kBlockNbytes;
  options.queue_depth = 3;
  options.num_threads = 2;
  return options;
}

inline std::unique_ptr<Engine> open_engine(const TestOptions& options) {
  auto engine = EngineForTests::open(options, options.tamper);
  CHECK(engine.ok());
  return std::move(engine.value());
}

// Direct where the file system has it, which is what differs from the Python suite least.
inline std::int32_t open_file(Engine& engine, const TempFile& file) {
  auto id = engine.open_file(file.path(), true);
  if (!id.ok()) id = engine.open_file(file.path(), false);
  CHECK(id.ok());
  return id.value();
}

inline Ticket submit(Engine& engine, Operation operation, std::vector<Segment> segments,
                     Priority priority = Priority::kForward) {
  auto ticket = engine.submit(operation, segments, priority);
  CHECK(ticket.ok());
  return ticket.value();
}

inline void wait(const Ticket& ticket) {
  while (!ticket->wait_for(kTimeLimit)) CHECK(false);
}

inline void on_each_backend(const std::function<void(Backend)>& body) {
  body(Backend::kThreads);
  if (probe_uring().usable) body(Backend::kUring);
}

}  // namespace fixtures
