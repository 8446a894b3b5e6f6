// Wakes a rank that sleeps until something arrives. Lies in memory that its peers may share, also from other processes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace zc::comm {

class Doorbell {
 public:
  using Ticket = std::uint32_t;

  // What sleep() takes. Take it, look for all that may have arrived, and only then sleep.
  Ticket ticket() const { return rings_.load(); }

  // Until it has been rung since `ticket` was taken, at most `limit`. One thread at a time.
  void sleep(Ticket ticket, std::chrono::nanoseconds limit) {
    const timespec time{limit.count() / 1'000'000'000, limit.count() % 1'000'000'000};
    asleep_.store(1);
    syscall(SYS_futex, &rings_, FUTEX_WAIT, ticket, &time, nullptr, 0);
    asleep_.store(0, std::memory_order_relaxed);
  }

  // A system call only where somebody sleeps. From any thread.
  void ring() {
    rings_.fetch_add(1);
    if (asleep_.load() != 0) syscall(SYS_futex, &rings_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

 private:
  std::atomic<std::uint32_t> rings_{0};
  std::atomic<std::uint32_t> asleep_{0};
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
};

}  // namespace zc::comm
