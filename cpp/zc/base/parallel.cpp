#include "zc/base/parallel.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "zc/base/float_environment.h"

namespace zc {
namespace {

struct Loop {
  std::int64_t numel = 0;
  std::int64_t grain = 1;
  const std::function<void(std::int64_t, std::int64_t)>* body = nullptr;
};

class ThreadPool {
 public:
  explicit ThreadPool(int num_workers) {
    for (int worker = 0; worker < num_workers; ++worker) {
      try {
        workers_.emplace_back([this] { work(); });
      } catch (const std::system_error&) {  // the system gives no more: those that there are do the work
        break;
      }
    }
  }

  ~ThreadPool() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    begun_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void run(const Loop& loop) {
    {
      const std::lock_guard lock(mutex_);
      loop_ = loop;
      next_.store(0, std::memory_order_relaxed);
      open_ = true;
      ++generation_;
    }
    begun_.notify_all();
    take(loop);
    std::unique_lock lock(mutex_);
    open_ = false;  // a worker that has not woken up yet need not
    ended_.wait(lock, [&] { return active_ == 0; });
  }

 private:
  void work() {
    const DefaultFloatEnvironment environment;
    std::unique_lock lock(mutex_);
    for (std::int64_t seen = 0;;) {
      begun_.wait(lock, [&] { return ending_ || (open_ && generation_ != seen); });
      if (ending_) return;
      seen = generation_;
      const Loop loop = loop_;
      ++active_;
      lock.unlock();
      take(loop);
      lock.lock();
      if (--active_ == 0) ended_.notify_one();
    }
  }

  void take(const Loop& loop) {
    for (;;) {
      const std::int64_t begin = next_.fetch_add(loop.grain, std::memory_order_relaxed);
      if (begin >= loop.numel) return;
      (*loop.body)(begin, std::min(begin + loop.grain, loop.numel));
    }
  }

  std::mutex mutex_;
  std::condition_variable begun_, ended_;
  Loop loop_;
  std::int64_t generation_ = 0;  // loops begun
  bool open_ = false;            // workers may join the last one
  int active_ = 0;               // workers in it
  bool ending_ = false;
  std::atomic<std::int64_t> next_{0};
  std::vector<std::thread> workers_;
};

std::atomic<int> wanted_threads{1};

// The pool of the process: made when a loop first wants it, again when another number of threads does.
class ProcessPool {
 public:
  ~ProcessPool() {
    if (process_ != getpid()) static_cast<void>(pool_.release());  // a forked child has the pool, not its threads
  }

  // False when the caller must run the loop alone.
  bool run(const Loop& loop, int num_threads) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    const pid_t process = getpid();
    if (pool_ != nullptr && process_ != process) return false;
    if (num_threads_ != num_threads) {
      pool_ = nullptr;
      pool_ = std::make_unique<ThreadPool>(num_threads - 1);
      num_threads_ = num_threads;
      process_ = process;
    }
    pool_->run(loop);
    return true;
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<ThreadPool> pool_;
  int num_threads_ = 1;
  pid_t process_ = getpid();  // that made pool_
};

}  // namespace

void set_num_threads(int num_threads) {
  cpu_set_t allowed;
  const int cores = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  wanted_threads = std::clamp(num_threads, 1, std::max(cores, 1));
}

int num_threads() { return wanted_threads; }

void parallel_for(std::int64_t numel, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body) {
  static ProcessPool pool;
  const int threads = wanted_threads;
  if (threads > 1 && numel > grain && pool.run({numel, grain, &body}, threads)) return;
  if (numel > 0) body(0, numel);
}

}  // namespace zc
