// Ranks that meet in memory which they share, as threads or as processes forked from the one that made it: what they
// need to find each other with connect_shm.
#pragma once

#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstring>
#include <new>
#include <span>
#include <stdexcept>

namespace zc::test {

class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    shared_ = new (memory) Shared;
  }
  ~Meeting() { munmap(shared_, sizeof(Shared)); }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  void exchange(int rank, std::span<const std::byte> own, std::span<std::byte> all) {
    if (all.size() > sizeof shared_->bytes) throw std::length_error("too much for a meeting");
    std::memcpy(shared_->bytes + static_cast<std::size_t>(rank) * own.size(), own.data(), own.size());
    wait();
    std::memcpy(all.data(), shared_->bytes, all.size());
    wait();
  }

  void wait() {
    const int round = shared_->round;
    if (++shared_->arrived == size_) {
      shared_->arrived = 0;
      ++shared_->round;
    }
    while (shared_->round == round) sched_yield();
  }

 private:
  struct Shared {
    std::atomic<int> arrived{0};
    std::atomic<int> round{0};
    std::byte bytes[1 << 16];
  };
  int size_;
  Shared* shared_;
};

}  // namespace zc::test
