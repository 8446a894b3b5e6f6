// Tells of ranks whose process is gone: killed, crashed, or ended past every hook.
//
// Beside the transport, every rank keeps a TCP connection to rank 0, over which nothing travels. The kernel closes it
// when the process ends, whatever the way; rank 0 tells the others of it. So a death is known within moments, although
// an MPI library may wait for the dead for ever. A rank that leaves in order says so before its connection ends.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "zc/comm/descriptor.h"

namespace zc::comm {

class Liveness {
 public:
  // What the other ranks must know of a rank. Travels as bytes between equal builds.
  struct Contact {
    char host[96];  // equal for ranks that reach each other over the loopback interface
    std::uint64_t token;
    std::uint16_t port;  // rank 0's; 0: it cannot listen
  };

  // Rank 0 listens from here on.
  Liveness(int rank, int size);
  ~Liveness();  // without goodbye(), peers take this rank for dead
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  const Contact& contact() const { return contact_; }

  // Starts to watch, in a thread that sleeps until something happens. all: every rank's contact, in rank order. Returns
  // why there is nothing to watch, empty when there is.
  std::string start(std::span<const Contact> all);

  // This rank leaves in order: its end is no death. From any thread.
  void goodbye() noexcept;

  // From any thread.
  int num_dead() const { return num_dead_; }
  bool is_dead(int rank) const { return dead_[static_cast<std::size_t>(rank)]; }

 private:
  enum class Kind : std::uint32_t { kHello, kGoodbye, kDied };
  struct Message {
    std::uint64_t token;
    Kind kind;
    std::int32_t rank;  // the sender's, or of the dead
  };
  struct Connection {
    Descriptor socket;
    int rank = -1;  // -1: it has not said hello
    bool left = false;
    Message incoming{};
    std::size_t filled = 0;  // bytes of `incoming`
  };

  static Descriptor tcp(int flags = 0);
  void listen();
  std::string connect(std::uint16_t port);
  void run();
  void accept_one();
  bool read(Connection& connection);  // false: it has ended
  bool take(Connection& connection);  // false: it is no rank's
  void bury(int rank);
  void send(const Connection& connection, Kind kind, int rank) const noexcept;

  const int rank_;
  const int size_;
  Contact contact_{};
  std::uint64_t token_ = 0;

  std::mutex mutex_;                     // guards what follows, which only the thread adds to and takes from
  Descriptor listener_;                  // until all ranks have said hello
  std::vector<Connection> connections_;  // of rank 0: to each rank; of the others: to rank 0
  int num_greeted_ = 0;                  // rank 0: ranks that have said hello
  std::condition_variable greeted_;      // all of them
  bool leaving_ = false;

  std::vector<std::atomic<bool>> dead_;
  std::atomic<int> num_dead_{0};
  Descriptor wake_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace zc::comm
