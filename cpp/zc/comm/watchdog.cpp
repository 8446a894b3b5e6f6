#include "zc/comm/watchdog.h"

#include <unistd.h>

namespace zc::comm {

Watchdog::Watchdog(std::chrono::milliseconds timeout, std::string message)
    : thread_([this, timeout, text = std::move(message) + "\n"] {
        std::unique_lock lock(mutex_);
        if (released_.wait_for(lock, timeout, [this] { return done_; })) return;
        [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
        _exit(1);
      }) {}

void Watchdog::release() {
  {
    std::lock_guard lock(mutex_);
    done_ = true;
    released_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace zc::comm
