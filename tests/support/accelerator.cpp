// A device in host memory, registered by PyTorch's hooks for devices of others (PrivateUse1).
//
// Streams are threads. Copies run late on the stream that is current; kernels are those of the
// CPU, in the calling thread, after the work of the stream that is current. Memory is allocated
// and freed in the order of a stream, as by the caching allocator of CUDA: freed memory is
// poisoned behind the stream's work, and goes to the next allocation of that stream. A forgotten
// wait therefore reads NaN.
//
// Sources: c10/core/impl/DeviceGuardImplInterface.h, ATen/detail/PrivateUse1HooksInterface.h.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr auto kLate = std::chrono::microseconds(300);
constexpr int kPoison = 0xFF;  // All ones is a NaN in every IEEE format.

const c10::Device device(kDevice, 0);

// One stream: a thread that runs tasks in order, and the memory that was freed on it.
class Queue {
 public:
  uint64_t submit(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    changed_.notify_all();
    return ++submitted_;
  }

  void wait(uint64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
  }

  bool is_done(uint64_t number) {
    std::lock_guard lock(mutex_);
    return done_ >= number;
  }

  uint64_t submitted() {
    std::lock_guard lock(mutex_);
    return submitted_;
  }

  void drain() { wait(submitted()); }

  void* take(size_t nbytes) {
    {
      std::lock_guard lock(mutex_);
      auto found = freed_.find(nbytes);
      if (found != freed_.end()) {
        void* memory = found->second;
        freed_.erase(found);
        return memory;
      }
    }
    void* memory = std::aligned_alloc(256, (nbytes + 255) / 256 * 256);
    std::memset(memory, kPoison, nbytes);
    return memory;
  }

  void give(void* memory, size_t nbytes) {
    submit([=] { std::memset(memory, kPoison, nbytes); });
    std::lock_guard lock(mutex_);
    freed_.emplace(nbytes, memory);
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::multimap<size_t, void*> freed_;
  uint64_t submitted_ = 0, done_ = 0;
  std::thread thread_;
};

// Never freed: threads of streams live as long as the process.
struct Streams {
  std::mutex mutex;
  std::vector<Queue*> queues{new Queue};
};
Streams& streams = *new Streams;
thread_local c10::StreamId current_id = 0;

Queue& queue_of(c10::StreamId id) {
  std::lock_guard lock(streams.mutex);
  return *streams.queues.at(id);
}

Queue& current() { return queue_of(current_id); }

c10::Stream stream_of(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }

struct Owned {
  Queue* queue;
  void* memory;
  size_t nbytes;
};

struct Allocator final : c10::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, device};
    auto* owned = new Owned{&current(), nullptr, nbytes};
    owned->memory = owned->queue->take(nbytes);
    return {owned->memory, owned, &free, device};
  }
  static void free(void* context) {
    std::unique_ptr<Owned> owned(static_cast<Owned*>(context));
    owned->queue->give(owned->memory, owned->nbytes);
  }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kDevice, &allocator)

struct Mark {
  Queue* queue;
  uint64_t number;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = kDevice;
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream_of(current_id); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard lock(streams.mutex);
    streams.queues.push_back(new Queue);
    return stream_of(static_cast<c10::StreamId>(streams.queues.size() - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current_id, stream.id()));
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    Queue& queue = queue_of(stream.id());
    delete static_cast<Mark*>(*event);
    *event = new Mark{&queue, queue.submitted()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Mark mark = *static_cast<Mark*>(event);
    queue_of(stream.id()).submit([mark] { mark.queue->wait(mark.number); });
  }
  bool queryEvent(void* event) const override {
    auto* mark = static_cast<Mark*>(event);
    return mark == nullptr || mark->queue->is_done(mark->number);
  }
  void synchronizeEvent(void* event) const override {
    auto* mark = static_cast<Mark*>(event);
    if (mark != nullptr) mark->queue->wait(mark->number);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue_of(stream.id()).drain();
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    std::vector<Queue*> all;
    {
      std::lock_guard lock(streams.mutex);
      all = streams.queues;
    }
    for (Queue* queue : all) queue->drain();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Copies bytes on the stream that is current; late where nobody waits at once.
void copy_bytes(void* target, const void* source, size_t nbytes, bool is_late = false) {
  current().submit([=] {
    if (is_late) std::this_thread::sleep_for(kLate);
    std::memcpy(target, source, nbytes);
  });
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    at::DataPtr fresh = allocator.allocate(nbytes);
    size_t kept = std::min(nbytes, storage.nbytes());
    if (kept != 0) copy_bytes(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};
Hooks hooks;
const bool are_hooks_registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  const auto scalar = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, scalar);
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (source.dtype() == target.dtype() && source.is_contiguous() && target.is_contiguous() &&
      source.numel() == target.numel()) {
    if (source.nbytes() != 0) {
      copy_bytes(target.data_ptr(), source.data_ptr(), source.nbytes(), non_blocking);
    }
    const bool is_on_device = source.device() == target.device();
    if (!non_blocking && !is_on_device) current().drain();
  } else {
    current().drain();
    at::Tensor to = on_host(target);
    at::native::copy_(to, on_host(source));
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes());
  return copy_from(source, target, false);
}

at::Scalar number_of(const at::Tensor& tensor) {
  current().drain();
  return at::native::_local_scalar_dense_cpu(on_host(tensor));
}

void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  current().drain();
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &number_of);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("is_set_to", &at::native::is_set_to);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage",
         static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>());
}

}  // namespace
