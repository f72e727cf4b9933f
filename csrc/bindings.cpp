// infinity._core: the library in io/ and the arena, as Python sees them.
//
// Only this file and bindings_*.cpp have pybind11 and throw. Blocking calls release the GIL and look
// for signals every 50 ms. No thread of ours ever runs Python code.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <unistd.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "arena.h"
#include "bindings_decode.h"
#include "bindings_update.h"
#include "infinity_io/crc32c.h"
#include "infinity_io/engine.h"
#include "infinity_io/probe.h"
#include "page_checksums.h"

namespace py = pybind11;
using namespace std::chrono_literals;

namespace infinity {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSignalInterval = 50ms;

[[noreturn]] void raise_named(const char* type, const py::object& value) {
  PyErr_SetObject(py::module_::import("infinity.errors").attr(type).ptr(), value.ptr());
  throw py::error_already_set();
}

[[noreturn]] void raise_storage_error(const io::Error& error, const std::string& path) {
  const py::object type = py::module_::import("infinity.errors").attr("StorageError");
  raise_named(
      "StorageError",
      type(error.code, py::arg("operation") = io::name(error.operation), py::arg("path") = path,
           py::arg("offset_nbytes") = error.offset_nbytes, py::arg("nbytes") = error.nbytes,
           py::arg("detail") = error.detail == nullptr ? "" : error.detail));
}

[[noreturn]] void raise_os_error(int code, const std::string& what) {
  PyErr_SetObject(PyExc_OSError, py::make_tuple(code, what + ": " + std::strerror(code)).ptr());
  throw py::error_already_set();
}

[[noreturn]] void raise_in_child() {
  raise_named("UnsupportedError",
              py::str("the storage engine does not exist in a forked process: its threads stayed "
                      "in the parent. Open a new engine here, or start workers with the 'spawn' "
                      "or 'forkserver' method"));
}

double seconds(std::chrono::nanoseconds duration) {
  return std::chrono::duration<double>(duration).count();
}

// Calls `is_finished(slice)` without the GIL until it is true, a signal handler raises, or the
// time is up. Returns whether it finished; `timeout_s` None waits for ever.
template <typename Wait>
bool wait_interruptibly(const py::object& timeout_s, Wait is_finished) {
  constexpr double kLongest = 1e9;  // Beyond it, and for NaN, the clock's integer would overflow.
  const double limit_s = timeout_s.is_none() ? kLongest : timeout_s.cast<double>();
  const bool is_limited = limit_s < kLongest;
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(
                         std::chrono::duration<double>(is_limited ? std::max(limit_s, 0.0) : 0.0));
  while (true) {
    std::chrono::nanoseconds slice = kSignalInterval;
    if (is_limited) {
      slice = std::min<std::chrono::nanoseconds>(slice, deadline - Clock::now());
      slice = std::max<std::chrono::nanoseconds>(slice, 0ns);
    }
    bool has_finished = false;
    {
      const py::gil_scoped_release released;
      has_finished = is_finished(slice);
    }
    if (has_finished) return true;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (is_limited && Clock::now() >= deadline) return false;
  }
}

// A Python integer of 0..2^64-1. pybind11's own message would name neither the number nor the
// range.
std::uint64_t number_of(const py::handle& value, const char* what) {
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!index) throw py::error_already_set();  // TypeError: no integer
  const unsigned long long number = PyLong_AsUnsignedLongLong(index.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    throw py::value_error(std::string(what) + "=" + std::string(py::str(value)) +
                          ", expected 0..2^64-1");
  }
  return number;
}

// What cannot be the id of a file is that of none: the engine says so, as for any other.
std::int32_t file_of(const py::handle& value) {
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!index) throw py::error_already_set();
  int is_beyond = 0;
  const long long number = PyLong_AsLongLongAndOverflow(index.ptr(), &is_beyond);
  constexpr long long kLargest = std::numeric_limits<std::int32_t>::max();
  return is_beyond != 0 || number < 0 || number > kLargest ? -1 : static_cast<std::int32_t>(number);
}

io::Segment segment_of(const py::handle& item) {
  const auto fields = py::reinterpret_steal<py::object>(
      PySequence_Fast(item.ptr(), "a segment is (file, offset_nbytes, address, nbytes)"));
  if (!fields) throw py::error_already_set();
  if (PySequence_Fast_GET_SIZE(fields.ptr()) != 4) {
    throw py::value_error("a segment is (file, offset_nbytes, address, nbytes), four numbers");
  }
  const auto field = [&fields](py::ssize_t index, const char* what) {
    return number_of(PySequence_Fast_GET_ITEM(fields.ptr(), index), what);
  };
  return {file_of(PySequence_Fast_GET_ITEM(fields.ptr(), 0)), field(1, "offset_nbytes"),
          field(2, "address"), field(3, "nbytes")};
}

io::Priority priority_of(int priority) {
  if (priority < 0 || static_cast<std::size_t>(priority) >= io::kNumPriorities) {
    throw py::value_error("priority=" + std::to_string(priority) + ", expected 0.." +
                          std::to_string(io::kNumPriorities - 1));
  }
  return static_cast<io::Priority>(priority);
}

void check_path(const std::string& path) {
  if (path.empty() || path.find('\0') != std::string::npos) {
    throw py::value_error("a path is not empty and has no NUL byte");
  }
}

// The library aborts where its caller breaks the contract; Python gets an error.
void check_options(const io::Options& options) {
  const auto refuse = [](const char* key, std::uint32_t value, const char* expected) {
    throw py::value_error(std::string(key) + "=" + std::to_string(value) + ", expected " +
                          expected);
  };
  constexpr std::uint32_t kMost = 1024;
  if (options.block_nbytes == 0 || options.block_nbytes % kPageNbytes != 0 ||
      options.block_nbytes > io::kMaxBlockNbytes) {
    refuse("block_nbytes", options.block_nbytes, "a multiple of 4096 up to 2^30");
  }
  const auto check_count = [&](const char* key, std::uint32_t value) {
    if (value == 0 || value > kMost) refuse(key, value, "1..1024");
  };
  check_count("queue_depth", options.queue_depth);
  if (options.min_queue_depth > options.queue_depth) {
    refuse("min_queue_depth", options.min_queue_depth, "at most queue_depth");
  }
  const bool is_out_of_order = options.max_queue_depth < options.queue_depth;
  if (options.min_queue_depth != 0 && (is_out_of_order || options.max_queue_depth > kMost)) {
    refuse("max_queue_depth", options.max_queue_depth, "from queue_depth to 1024");
  }
  check_count("num_threads", options.num_threads);
  if (options.max_pending == 0) refuse("max_pending", 0, "at least 1");
}

class PyTicket {
 public:
  explicit PyTicket(io::Ticket ticket) : ticket_(std::move(ticket)), pid_(getpid()) {}

  [[nodiscard]] bool done() const {
    if (getpid() != pid_) raise_in_child();
    return ticket_->done();
  }

  bool cancel() const {
    if (getpid() != pid_) raise_in_child();
    const py::gil_scoped_release released;
    return ticket_->cancel();
  }

  void wait(const py::object& timeout_s) const {
    if (getpid() != pid_) raise_in_child();
    const bool is_done = ticket_->done() || wait_interruptibly(timeout_s, [this](auto slice) {
                           return ticket_->wait_for(slice);
                         });
    if (!is_done) {
      PyErr_SetString(PyExc_TimeoutError, "the request is still queued or in flight");
      throw py::error_already_set();
    }
    if (ticket_->failed()) raise_storage_error(ticket_->error(), ticket_->error_path());
  }

  // (file, nbytes, issued_ns, completed_ns) per file that was reached, on CLOCK_MONOTONIC.
  [[nodiscard]] py::list passages() const {
    if (getpid() != pid_) raise_in_child();
    py::list found;
    if (!ticket_->done()) return found;
    for (const io::Passage& passage : ticket_->passages()) {
      if (!passage.has_moved()) continue;
      found.append(py::make_tuple(passage.file, passage.nbytes, nanoseconds(passage.issued_at),
                                  nanoseconds(passage.completed_at)));
    }
    return found;
  }

 private:
  static std::int64_t nanoseconds(Clock::time_point at) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(at.time_since_epoch()).count();
  }

  io::Ticket ticket_;
  pid_t pid_;
};

class PyEngine {
 public:
  // `arena`: an Arena or None. It stays until `close`.
  PyEngine(bool is_uring, py::object arena, std::uint32_t block_nbytes, std::uint32_t queue_depth,
           std::uint32_t num_threads, std::uint32_t max_pending, std::uint32_t min_queue_depth,
           std::uint32_t max_queue_depth)
      : arena_(std::move(arena)) {
    io::Options options;
    options.backend = is_uring ? io::Backend::kUring : io::Backend::kThreads;
    options.block_nbytes = block_nbytes;
    options.queue_depth = queue_depth;
    options.min_queue_depth = min_queue_depth;
    options.max_queue_depth = max_queue_depth;
    options.num_threads = num_threads;
    options.max_pending = max_pending;
    if (!arena_.is_none()) {
      if (!py::isinstance<Arena>(arena_)) throw py::type_error("arena: expected an Arena or None");
      const auto& memory = arena_.cast<const Arena&>();
      options.arena = {memory.address(), memory.capacity_nbytes()};
    }
    check_options(options);
    auto opened = io::Engine::open(options);
    if (!opened.ok()) raise_storage_error(opened.error(), "io_uring");
    engine_ = std::move(opened.value());
  }

  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  ~PyEngine() {
    if (engine_->in_child()) {
      (void)engine_.release();  // Its threads are not here: nothing can be joined or drained.
      return;
    }
    const py::gil_scoped_release released;
    engine_.reset();
  }

  [[nodiscard]] std::int32_t open(const std::string& path, bool direct, bool read_only) {
    io::Engine& engine = live();
    check_path(path);
    auto file = [&] {
      const py::gil_scoped_release released;  // The first one on a device registers the arena.
      return engine.open_file(path, direct, read_only);
    }();
    if (!file.ok()) raise_storage_error(file.error(), path);
    return file.value();
  }

  void close_file(std::int32_t file) {
    const std::string path = path_of(file);
    io::Error error;
    {
      const py::gil_scoped_release released;
      error = engine_->close_file(file);
    }
    if (error) raise_storage_error(error, path);
  }

  [[nodiscard]] std::uint32_t alignment_nbytes(std::int32_t file) {
    auto alignment = live().alignment_nbytes(file);
    if (!alignment.ok()) raise_storage_error(alignment.error(), path_of(file));
    return alignment.value();
  }

  // segments: (file, offset_nbytes, address, nbytes) each. Waits while the queue is full.
  [[nodiscard]] PyTicket submit(bool is_write, const py::iterable& segments, int priority,
                                const py::object& timeout_s) {
    io::Engine& engine = live();
    std::vector<io::Segment> converted;
    for (const py::handle item : segments) converted.push_back(segment_of(item));
    const io::Priority urgency = priority_of(priority);
    const auto operation = is_write ? io::Operation::kWrite : io::Operation::kRead;
    const auto attempt = [&](std::chrono::nanoseconds slice) {
      return engine.submit(operation, converted, urgency, slice);
    };
    const auto is_full = [](const io::Result<io::Ticket>& answer) {
      return !answer.ok() && answer.error().code == EAGAIN;
    };
    auto ticket = attempt(0ns);  // With the GIL: microseconds, unless the queue is full.
    const bool is_decided = !is_full(ticket) || wait_interruptibly(timeout_s, [&](auto slice) {
      ticket = attempt(slice);
      return !is_full(ticket);
    });
    if (!is_decided) {
      PyErr_SetString(PyExc_TimeoutError, "the queue of the device is full; nothing was queued");
      throw py::error_already_set();
    }
    if (!ticket.ok()) raise_storage_error(ticket.error(), path_of(ticket.error().file));
    return PyTicket(std::move(ticket.value()));
  }

  void sync(std::int32_t file) {
    io::Engine& engine = live();
    io::Error error;
    {
      const py::gil_scoped_release released;
      error = engine.sync(file);
    }
    if (error) raise_storage_error(error, path_of(file));
  }

  bool drain(const py::object& timeout_s) {
    io::Engine& engine = live();
    return wait_interruptibly(timeout_s, [&engine](auto slice) { return engine.drain(slice); });
  }

  void close() {
    drain(py::none());
    {
      const py::gil_scoped_release released;
      engine_->close();
    }
    arena_ = py::none();  // Nothing is in flight, so the memory may go.
  }

  // One tuple per open file, and one per path of the closed ones.
  [[nodiscard]] py::list stats() {
    py::list reports;
    for (const io::FileReport& report : live().stats()) {
      const io::FileStats& stats = report.stats;
      reports.append(py::make_tuple(
          report.id, report.path, stats.read_nbytes, stats.write_nbytes, stats.num_reads,
          stats.num_writes, stats.num_retries, stats.num_short_transfers, stats.num_errors,
          seconds(stats.busy), seconds(stats.in_flight), stats.max_in_flight,
          stats.read_latency.counts, stats.write_latency.counts));
    }
    return reports;
  }

  [[nodiscard]] py::list lanes() {
    py::list lanes;
    for (const io::LaneInfo& info : live().lanes()) {
      py::dict lane;
      lane["device"] = info.device;
      lane["ring_flags"] = info.ring_flags;
      lane["has_registered_buffers"] = info.has_registered_buffers;
      lane["has_registered_files"] = info.has_registered_files;
      lane["has_fixed_vectors"] = info.has_fixed_vectors;
      lane["register_buffers_errno"] = info.register_buffers_errno;
      lane["num_pending"] = info.stats.num_pending;
      lane["num_in_flight"] = info.stats.num_in_flight;
      lane["queue_depth"] = info.stats.queue_depth;
      lane["num_cancelled"] = info.stats.num_cancelled;
      lane["cpu_s"] = seconds(info.stats.cpu);
      lane["stall_s"] = seconds(info.stats.stall);
      lane["queue_wait"] = info.stats.queue_wait.counts;
      lanes.append(lane);
    }
    return lanes;
  }

 private:
  [[nodiscard]] io::Engine& live() {
    if (engine_->in_child()) raise_in_child();
    return *engine_;
  }

  [[nodiscard]] std::string path_of(std::int32_t file) {
    for (const io::FileReport& report : live().stats()) {
      if (report.id == file) return report.path;
    }
    return "file " + std::to_string(file);
  }

  py::object arena_;  // Goes after the engine, whose transfers use its memory.
  std::unique_ptr<io::Engine> engine_;
};

// Far above any machine; sums of a few such numbers do not overflow.
constexpr std::size_t kMaxCapacityNbytes = std::size_t{1} << 56;

void check_capacity(std::size_t capacity_nbytes) {
  if (capacity_nbytes == 0 || capacity_nbytes % kPageNbytes != 0 ||
      capacity_nbytes > kMaxCapacityNbytes) {
    throw py::value_error("capacity_nbytes=" + std::to_string(capacity_nbytes) +
                          ", expected a multiple of 4096 above 0, up to 2^56");
  }
}

std::unique_ptr<Arena> open_arena(std::size_t capacity_nbytes, bool huge_pages,
                                  unsigned num_threads, int numa_node, bool is_shared) {
  check_capacity(capacity_nbytes);
  auto arena = std::make_unique<Arena>();
  int code = 0;
  {
    const py::gil_scoped_release released;
    code = arena->open(capacity_nbytes, huge_pages, num_threads, numa_node, is_shared);
  }
  if (code != 0) {
    raise_os_error(code, "cannot map and populate " + std::to_string(capacity_nbytes) + " bytes");
  }
  return arena;
}

std::unique_ptr<ArenaView> open_view(int descriptor, std::size_t nbytes) {
  check_capacity(nbytes);
  auto view = std::make_unique<ArenaView>();
  if (const int code = view->open(descriptor, nbytes)) {
    raise_os_error(code, "cannot map " + std::to_string(nbytes) + " bytes of another process");
  }
  return view;
}

std::unique_ptr<Window> open_window(std::size_t capacity_nbytes) {
  check_capacity(capacity_nbytes);
  auto window = std::make_unique<Window>();
  if (const int code = window->open(capacity_nbytes)) {
    raise_os_error(code,
                   "cannot reserve " + std::to_string(capacity_nbytes) + " bytes of address space");
  }
  return window;
}

py::buffer_info bytes_at(std::uintptr_t address, std::size_t nbytes) {
  return {reinterpret_cast<unsigned char*>(address), static_cast<py::ssize_t>(nbytes)};  // NOLINT
}

using Move = int (Window::*)(Arena&, std::size_t, std::size_t, std::size_t);

const char* explain_move(int code) {
  switch (code) {
    case ERANGE: return "is empty, out of bounds, or not a multiple of 4096 bytes";
    case EBUSY: return "is mapped already, in this window or another one";
    case ENOENT: return "is not what was mapped: unmap takes the arguments of map";
    default: return nullptr;
  }
}

template <Move move>
void move_pages(Window& window, Arena& arena, std::size_t arena_offset_nbytes, std::size_t nbytes,
                std::size_t window_offset_nbytes) {
  const int code = (window.*move)(arena, arena_offset_nbytes, nbytes, window_offset_nbytes);
  if (code == 0) return;
  const std::string range = "the range of " + std::to_string(nbytes) + " bytes at arena offset " +
                            std::to_string(arena_offset_nbytes) + ", window offset " +
                            std::to_string(window_offset_nbytes) + " ";
  if (const char* explanation = explain_move(code)) throw py::value_error(range + explanation);
  raise_os_error(code, range + "could not be moved");
}

py::dict probe_uring() {
  const io::UringProbe probe = io::probe_uring();
  py::dict found;
  found["usable"] = probe.usable;
  found["errno"] = probe.code;
  found["step"] = probe.step;
  found["ring_flags"] = probe.ring_flags;
  return found;
}

const void* pages_at(std::uintptr_t address, std::size_t nbytes) {
  if (nbytes % io::kChecksumPageNbytes != 0) {
    throw py::value_error(std::to_string(nbytes) + " bytes are not a multiple of 4096");
  }
  if (nbytes > kMaxCapacityNbytes ||
      address > std::numeric_limits<std::uintptr_t>::max() - nbytes ||
      (address == 0 && nbytes != 0)) {
    throw py::value_error("there are no " + std::to_string(nbytes) + " bytes at address " +
                          std::to_string(address));
  }
  return reinterpret_cast<const void*>(address);  // NOLINT: addresses come as integers.
}

py::bytes bytes_of(const std::vector<std::uint32_t>& checksums) {
  return {reinterpret_cast<const char*>(checksums.data()), checksums.size() * sizeof checksums[0]};
}

py::bytes checksums_of(std::uintptr_t address, std::size_t nbytes, std::size_t num_threads) {
  const void* pages = pages_at(address, nbytes);
  std::vector<std::uint32_t> checksums(nbytes / io::kChecksumPageNbytes);
  {
    const py::gil_scoped_release released;
    crc32c_pages(pages, checksums.size(), checksums.data(), num_threads);
  }
  return bytes_of(checksums);
}

py::bytes finish_digests(PageDigests& digests, std::size_t num_threads) {
  std::vector<std::uint32_t> checksums;
  {
    const py::gil_scoped_release released;
    checksums = digests.finish(num_threads);
  }
  return bytes_of(checksums);
}

// -1: every page has the checksum that is expected.
py::ssize_t find_bad_page(std::uintptr_t address, std::size_t nbytes, const py::bytes& expected,
                          std::size_t num_threads) {
  const void* pages = pages_at(address, nbytes);
  const std::size_t num_pages = nbytes / io::kChecksumPageNbytes;
  const std::string_view raw = expected;
  if (raw.size() != num_pages * sizeof(std::uint32_t)) {
    throw py::value_error("expected 4 bytes of checksum per page");
  }
  std::vector<std::uint32_t> checksums(num_pages);
  std::memcpy(checksums.data(), raw.data(), raw.size());
  const py::gil_scoped_release released;
  const std::size_t bad = first_bad_page(pages, num_pages, checksums.data(), num_threads);
  return bad == num_pages ? -1 : static_cast<py::ssize_t>(bad);
}

std::vector<std::string> crc32c_kernels() {
  std::vector<std::string> names;
  for (const io::Crc32cKernel& kernel : io::crc32c_kernels()) names.emplace_back(kernel.name);
  return names;
}

py::bytes crc32c_of_zeros() {
  const std::vector<unsigned char> zeros(io::kChecksumPageNbytes);
  return checksums_of(reinterpret_cast<std::uintptr_t>(zeros.data()), zeros.size(), 1);
}

// The stack of each of these threads, of all threads where there are none: its frames, the innermost
// first. No thread goes on meanwhile, since the GIL is held: a generator that went on would lose its
// caller. Python 3.11 may collect garbage where a frame is made, which runs code that gives the GIL away.
py::dict stacks(const std::vector<unsigned long>& threads) {
  struct NoCollections {
    const bool were_on = PyGC_Disable() != 0;
    ~NoCollections() {
      if (were_on) PyGC_Enable();
    }
  } guard;
  const py::dict innermost = py::module_::import("sys").attr("_current_frames")();
  py::dict found;
  for (const auto& [thread, frame] : innermost) {
    const bool is_asked = std::find(threads.begin(), threads.end(),
                                    thread.cast<unsigned long>()) != threads.end();
    if (!threads.empty() && !is_asked) continue;
    py::list frames;
    py::object next = py::reinterpret_borrow<py::object>(frame);
    while (next) {
      frames.append(next);
      next = py::reinterpret_steal<py::object>(
          reinterpret_cast<PyObject*>(PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(next.ptr()))));
    }
    found[thread] = frames;
  }
  return found;
}

}  // namespace

}  // namespace infinity

PYBIND11_MODULE(_core, module) {
  using namespace infinity;  // NOLINT: the module's body is the namespace.
  module.doc() = "Native part of infinity: the I/O engine, the arena and its windows.";
  module.attr("HAS_URING") = io::built_with_uring();
  module.def("probe_uring", &probe_uring);
  module.def("can_remap", &can_remap);
  module.def("stacks", &stacks, py::arg("threads"));
  module.def("crc32c_pages", &checksums_of, py::arg("address"), py::arg("nbytes"),
             py::arg("num_threads") = 1);
  module.def("first_bad_page", &find_bad_page, py::arg("address"), py::arg("nbytes"),
             py::arg("expected"), py::arg("num_threads") = 1);
  py::class_<PageDigests>(module, "PageDigests")
      .def(py::init([](std::uintptr_t address, std::size_t nbytes) {
             return PageDigests(pages_at(address, nbytes), nbytes / io::kChecksumPageNbytes);
           }),
           py::arg("address"), py::arg("nbytes"))
      .def("finish", &finish_digests, py::arg("num_threads") = 1);
  module.def("crc32c_kernels", &crc32c_kernels);
  module.def("crc32c_of_zeros", &crc32c_of_zeros);
  module.def(
      "direct_alignment",
      [](int fd) {
        const io::DirectAlignment found = io::direct_alignment(fd);
        return py::make_tuple(found.memory_nbytes, found.offset_nbytes);
      },
      py::arg("fd"));

  py::class_<Arena>(module, "Arena", py::buffer_protocol())
      .def(py::init(&open_arena), py::arg("capacity_nbytes"), py::arg("huge_pages"),
           py::arg("num_threads"), py::arg("numa_node") = -1, py::arg("is_shared") = false)
      .def_property_readonly("descriptor", &Arena::descriptor)
      .def("close_file", &Arena::close_file)
      .def_property_readonly("prefers_node", &Arena::prefers_node)
      .def_property_readonly("address", &Arena::address)
      .def_property_readonly("capacity_nbytes", &Arena::capacity_nbytes)
      .def_buffer(
          [](const Arena& arena) { return bytes_at(arena.address(), arena.capacity_nbytes()); });

  py::class_<ArenaView>(module, "ArenaView", py::buffer_protocol())
      .def(py::init(&open_view), py::arg("descriptor"), py::arg("nbytes"))
      .def_buffer([](const ArenaView& view) {
        const auto* bytes = reinterpret_cast<const unsigned char*>(view.address());  // NOLINT
        return py::buffer_info(bytes, static_cast<py::ssize_t>(view.nbytes()));  // Read-only.
      });

  py::class_<Window>(module, "Window", py::buffer_protocol())
      .def(py::init(&open_window), py::arg("capacity_nbytes"))
      .def_property_readonly("address", &Window::address)
      .def_property_readonly("capacity_nbytes", &Window::capacity_nbytes)
      .def("map", &move_pages<&Window::map>, py::arg("arena"), py::arg("arena_offset_nbytes"),
           py::arg("nbytes"), py::arg("window_offset_nbytes"))
      .def("unmap", &move_pages<&Window::unmap>, py::arg("arena"), py::arg("arena_offset_nbytes"),
           py::arg("nbytes"), py::arg("window_offset_nbytes"))
      .def_buffer([](const Window& window) {
        return bytes_at(window.address(), window.capacity_nbytes());
      });

  py::class_<PyTicket>(module, "Ticket")
      .def("done", &PyTicket::done)
      .def("cancel", &PyTicket::cancel)
      .def("passages", &PyTicket::passages)
      .def("wait", &PyTicket::wait, py::arg("timeout_s") = py::none());

  py::class_<PyEngine>(module, "Engine")
      .def(py::init<bool, py::object, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t,
                    std::uint32_t, std::uint32_t>(),
           py::arg("is_uring"), py::arg("arena").none(true), py::arg("block_nbytes"),
           py::arg("queue_depth"), py::arg("num_threads"), py::arg("max_pending"),
           py::arg("min_queue_depth") = 0, py::arg("max_queue_depth") = 0)
      .def("open", &PyEngine::open, py::arg("path"), py::arg("direct"),
           py::arg("read_only") = false)
      .def("close_file", &PyEngine::close_file, py::arg("file"))
      .def("alignment_nbytes", &PyEngine::alignment_nbytes, py::arg("file"))
      .def("submit", &PyEngine::submit, py::arg("is_write"), py::arg("segments"),
           py::arg("priority"), py::arg("timeout_s") = py::none())
      .def("sync", &PyEngine::sync, py::arg("file"))
      .def("drain", &PyEngine::drain, py::arg("timeout_s") = py::none())
      .def("close", &PyEngine::close)
      .def("stats", &PyEngine::stats)
      .def("lanes", &PyEngine::lanes);

  bind_decode(module);
  bind_update(module);
}
