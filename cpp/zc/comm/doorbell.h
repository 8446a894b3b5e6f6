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
  enum Sleeper : std::uint32_t { kDriver = 1, kSpare = 2 };  // bits

  // What sleep() takes. Take it, look for all that may have arrived, and only then sleep.
  Ticket ticket() const { return rings_.load(); }

  // Until it has been rung since `ticket` was taken and wakes `who`, at most `limit`. One thread a sleeper.
  void sleep(Ticket ticket, std::chrono::nanoseconds limit, Sleeper who) {
    timespec until{};
    clock_gettime(CLOCK_MONOTONIC, &until);
    const std::chrono::nanoseconds end = std::chrono::nanoseconds(until.tv_nsec) + limit;
    until.tv_sec += end.count() / 1'000'000'000;
    until.tv_nsec = end.count() % 1'000'000'000;
    syscall(SYS_futex, &rings_, FUTEX_WAIT_BITSET, ticket, &until, nullptr, who);
  }

  // Whether a ring wakes a sleeper. One who does not sleep shall not be woken: that costs the peer a system call.
  void listen(Sleeper who) { listening_.fetch_or(who); }
  void ignore(Sleeper who) {
    if ((listening_.load() & who) != 0) listening_.fetch_and(~std::uint32_t{who});
  }

  // From any thread. Wakes `also` even if it does not listen.
  void ring(std::uint32_t also = 0) {
    rings_.fetch_add(1);
    const std::uint32_t who = listening_.load() | also;
    if (who != 0) syscall(SYS_futex, &rings_, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, who);
  }

 private:
  std::atomic<std::uint32_t> rings_{0};
  std::atomic<std::uint32_t> listening_{0};
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
};

}  // namespace zc::comm
