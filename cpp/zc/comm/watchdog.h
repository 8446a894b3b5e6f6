// For calls that can neither be given a timeout nor be interrupted, such as MPI_Init, which waits for all ranks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace zc::comm {

// Unless released or destroyed within `timeout`, writes `message` to standard error and ends the process with exit
// code 1.
class Watchdog {
 public:
  Watchdog(std::chrono::milliseconds timeout, std::string message);
  ~Watchdog() { release(); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void release();

 private:
  std::mutex mutex_;
  std::condition_variable released_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace zc::comm
