// A rank's collectives that run on its device: who sees them end, or fail.
//
// One thread a process ("zc-cuda-watch") looks at all of them while there are any, and sleeps else. A collective has
// ended when its event is done and all ranks have met for it under the guard of the host's communicator. It fails when
// they do not meet, when the device or NCCL reports an error, when a peer has failed, or when it is not done within the
// timeout after the ranks met and the one before it ended. Then all of the rank's groups are aborted, so that nothing
// on the device waits for peers any more, everything in flight fails with the first reason, and the ranks are told.
//
// Note: to free memory of a device waits for all that runs there, and to abort or destroy an NCCL communicator may wait
// for peers. The thread that watches must do neither: another one does ("zc-cuda-free").
#pragma once

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "zc/comm/communicator.h"
#include "zc/comm/work.h"

namespace zc::cuda {

// Ranks that run collectives on one stream of each, in call order.
class Group {
 public:
  virtual ~Group() = default;
  virtual std::string error() = 0;    // what has gone wrong asynchronously; empty while all is well
  virtual void abort() noexcept = 0;  // lets go of what waits on the device; may wait. Only the first call counts
};

class InFlight final : public comm::Driver, public std::enable_shared_from_this<InFlight> {
 public:
  using Clock = std::chrono::steady_clock;

  // host: connects all ranks of the job.
  explicit InFlight(std::shared_ptr<comm::Communicator> host) : host_(std::move(host)) {}

  void join(const std::shared_ptr<Group>& group);  // to be aborted when the rank fails

  struct Flight {
    std::shared_ptr<comm::Work::State> state{};  // with its event, recorded
    comm::Work meeting{};
    std::shared_ptr<void> memory{};  // lives until it has ended
    std::string label{};
    std::chrono::milliseconds timeout{};
  };
  // Fails it at once when the rank has failed.
  void add(const std::shared_ptr<Group>& group, Flight flight);

  // The rank has failed: see above. The first reason counts. announce: the peers do not know yet.
  void fail(const std::string& reason, bool announce);
  std::string failure() const;
  void check() const;  // throws kComm when it has failed

  bool is_empty() const;  // nothing is in flight
  void look();            // completes what has ended, unless another thread is at it
  void drive(comm::Work::State& state, Clock::time_point deadline) override;

 private:
  struct Entry : Flight {
    Clock::time_point since{};  // the first of its group; later: and all ranks have met
    bool ended = false;         // on the device
    bool met = false;
  };
  struct Queue {
    std::shared_ptr<Group> group;
    std::deque<std::shared_ptr<Entry>> entries;
  };
  std::shared_ptr<Entry> next_of(Group& group);
  bool has_ended(Group& group, Entry& entry);
  void check_quiet(Group& group, const Entry& entry, Clock::time_point now);

  std::shared_ptr<comm::Communicator> host_;

  std::mutex looking_;  // held by who looks; guards what follows, and what is in entries
  Clock::time_point looked_for_failures_{};
  std::optional<Clock::time_point> peer_failed_{};  // when that was seen first

  mutable std::mutex mutex_;        // guards what follows
  std::map<Group*, Queue> queues_;  // of groups that have something in flight
  std::vector<std::weak_ptr<Group>> groups_;
  std::string failure_;
};

// Drops what may wait when it is dropped, after those given before, on the thread for that. From any thread.
void drop_elsewhere(std::shared_ptr<void> what);

// The same on a thread that nothing else waits for.
void drop_by_itself(std::shared_ptr<void> what);

}  // namespace zc::cuda
