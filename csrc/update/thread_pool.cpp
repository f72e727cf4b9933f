#include "thread_pool.h"

#include <system_error>

#include <pthread.h>
#include <signal.h>

namespace infinity::update {

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  has_work_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(std::size_t num_items, std::size_t num_threads,
                     const std::function<void(std::size_t)>& body) {
  const std::size_t num_useful = num_items < num_threads ? num_items : num_threads;
  if (num_useful <= 1) {
    for (std::size_t item = 0; item < num_items; ++item) body(item);
    return;
  }
  const std::lock_guard turn(turn_);
  start_up_to(num_useful - 1);
  const auto call = std::make_shared<Call>();
  call->body = &body;
  call->num_items = num_items;
  call->num_helpers_wanted = num_useful - 1;
  {
    const std::lock_guard lock(mutex_);
    call_ = call;
  }
  has_work_.notify_all();
  if (take_items(*call)) return;
  std::unique_lock lock(mutex_);
  is_done_.wait(lock, [&] { return call->num_done == call->num_items; });
}

void ThreadPool::start_up_to(std::size_t num_workers) {
  // Signals are for Python's main thread.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    while (workers_.size() < num_workers) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {  // NOLINT: those that there are do all the work.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void ThreadPool::work() {
  while (true) {
    std::shared_ptr<Call> call;
    {
      std::unique_lock lock(mutex_);
      has_work_.wait(
          lock, [&] { return is_closing_ || (call_ != nullptr && call_->num_helpers_wanted > 0); });
      if (is_closing_) return;
      call = call_;
      --call->num_helpers_wanted;
    }
    if (take_items(*call)) {
      const std::lock_guard lock(mutex_);  // Else the caller could miss it between look and wait.
      is_done_.notify_all();
    }
  }
}

bool ThreadPool::take_items(Call& call) {
  std::size_t num_done = 0;
  std::size_t item = 0;
  while ((item = call.next.fetch_add(1)) < call.num_items) {
    (*call.body)(item);
    ++num_done;
  }
  // Whoever did nothing must not report: the call may be over and its body gone.
  return num_done != 0 && call.num_done.fetch_add(num_done) + num_done == call.num_items;
}

namespace {

ThreadPool* g_pool = nullptr;  // Never destroyed: at exit its threads may outlive static objects.
std::mutex g_mutex;

}  // namespace

ThreadPool& process_pool() {
  static const bool is_registered = [] {
    // A fork copies no threads. The child forgets the parent's pool and starts anew; the mutex is
    // held over the fork so that the child does not find it taken by a thread that it lacks.
    pthread_atfork([] { g_mutex.lock(); }, [] { g_mutex.unlock(); },
                   [] {
                     g_pool = nullptr;
                     g_mutex.unlock();
                   });
    return true;
  }();
  (void)is_registered;
  const std::lock_guard lock(g_mutex);
  if (g_pool == nullptr) g_pool = new ThreadPool;  // NOLINT: see above.
  return *g_pool;
}

}  // namespace infinity::update
