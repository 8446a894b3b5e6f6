// One rank's end of the job: its transport, the thread that makes all transport calls, and what its peers announced.
// Shared by the world communicator and everything split from it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "zc/comm/communicator.h"
#include "zc/comm/transport.h"

namespace zc::comm {

class Endpoint {
 public:
  using Clock = std::chrono::steady_clock;

  // The last pointer to it ends the progress thread; collectives still in flight fail. Call leave() before to let peers
  // know. In a forked child nothing is ended, since the thread is not there.
  static std::shared_ptr<Endpoint> open(std::unique_ptr<Transport> transport);

  Transport& transport() { return *transport_; }

  // --- From any thread.

  // Runs `task` on the progress thread, after those posted before. Throws kComm in a forked child, which has no such
  // thread.
  void post(std::function<void()> task);

  void set_activity(std::string_view activity);
  std::string activity() const;

  void leave(Departure departure, std::string_view reason, std::chrono::milliseconds grace) noexcept;
  std::string failure() const;  // this rank's own first failure, else a peer's

  // Message tags for the communicators made by split: the lowest number not in use, and to take one.
  int next_context() const { return next_context_; }
  void take_context(int context);

  // --- From the progress thread only.

  // Names one collective of one communicator.
  struct CallId {
    int context = 0;
    std::uint64_t sequence = 0;
    friend bool operator==(const CallId&, const CallId&) = default;
  };

  // What one peer announced.
  struct Peer {
    enum class State { kPresent, kFailed, kEnded, kRaised };  // kFailed: still there, but its communicators are broken
    State state = State::kPresent;
    std::string reason;
    CallId broken;  // the call that it did not finish, if it had entered one
    int order = 0;  // 1 for the first announcement that arrived, and so on
    bool gone() const { return state == State::kEnded || state == State::kRaised; }
  };
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)].peer; }

  void poll();  // looks for announcements

  // Records that this rank cannot finish `call`, which it had entered, and announces it as this rank's failure unless
  // the rank is leaving anyway. The first one counts.
  void give_up(const CallId& call, const std::string& reason) noexcept;

  // Throws when this rank has failed or left.
  void check_usable() const;

  bool leaving() const { return leaving_; }
  Clock::time_point leave_deadline() const;

 private:
  struct Announcement {
    Peer::State state;
    CallId broken;
    char text[1000];
  };
  struct Slot {
    Peer peer;
    Announcement incoming;
    Transport::Request request = nullptr;
  };
  struct Outgoing {
    std::unique_ptr<Announcement> message;
    Transport::Request request = nullptr;
  };

  explicit Endpoint(std::unique_ptr<Transport> transport);
  ~Endpoint();
  void run();
  void listen(int rank);
  void take(Slot& slot, int rank);
  void announce(Peer::State state, std::string_view reason);
  bool sent();  // all announcements have gone out
  void say_goodbye(Peer::State state, std::string_view reason);
  void close() noexcept;

  std::unique_ptr<Transport> transport_;
  const pid_t process_id_;
  std::vector<Slot> peers_;
  std::vector<Outgoing> outgoing_;
  int announcements_ = 0;
  CallId broken_;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::condition_variable goodbye_said_;
  std::deque<std::function<void()>> tasks_;
  std::string activity_;
  std::string own_failure_;
  std::string peer_failure_;
  std::string left_;
  Clock::time_point leave_deadline_;
  bool stop_ = false;
  bool goodbye_done_ = false;

  std::atomic<bool> leaving_{false};
  std::atomic<int> next_context_{1};
  std::thread thread_;
};

}  // namespace zc::comm
