#include "zc/io/workers.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace zc::io {

void run_workers(std::int64_t count, int num_workers, const std::function<void(int, std::int64_t)>& task) {
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&](int worker) {
    for (;;) {
      const std::int64_t index = next.fetch_add(1);
      if (index >= count) return;
      try {
        task(worker, index);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next = count;
      }
    }
  };
  std::vector<std::thread> others;
  for (int worker = 1; worker < std::min<std::int64_t>(count, num_workers); ++worker) {
    try {
      others.emplace_back(work, worker);
    } catch (const std::system_error&) {
      break;
    }
  }
  work(0);
  for (std::thread& other : others) other.join();
  if (failure) std::rethrow_exception(failure);
}

int num_copy_workers() {
  cpu_set_t allowed;
  const int cores = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  return std::clamp(cores, 1, 8);
}

}  // namespace zc::io
