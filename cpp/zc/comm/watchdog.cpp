#include "zc/comm/watchdog.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace zc::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLookPeriod{1};

}  // namespace

Watchdog::Watchdog(std::chrono::milliseconds timeout, std::string prefix, std::string message,
                   std::function<std::string()> look)
    : prefix_(std::move(prefix)),
      message_(std::move(message)),
      thread_([this, timeout, look = std::move(look)] { run(timeout, look); }) {}

void Watchdog::run(std::chrono::milliseconds timeout, const std::function<std::string()>& look) {
  const auto deadline = Clock::now() + timeout;
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto until = look ? std::min(deadline, Clock::now() + kLookPeriod) : deadline;
    if (released_.wait_until(lock, until, [this] { return done_; })) return;
    std::string text;
    if (until == deadline) {
      text = message_;
    } else {
      lock.unlock();  // whoever releases must not wait for a look
      text = look();
      lock.lock();
      if (done_) return;
    }
    if (text.empty()) continue;
    const std::string line = prefix_ + text + "\n";
    [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
    // Others are about to see the same, and MPI's launcher may end them as soon as this process has ended.
    if (until != deadline) std::this_thread::sleep_for(2 * kLookPeriod);
    _exit(1);
  }
}

void Watchdog::release() {
  {
    std::lock_guard lock(mutex_);
    done_ = true;
    released_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace zc::comm
