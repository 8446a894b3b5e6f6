// One rank's end of the job: its transport, who makes all transport calls, and what its peers announced. Shared by the
// world communicator and everything split from it.
//
// The driver has one collective of each communicator under way and gives them turns: each goes on until it has to wait
// for messages. So collectives of one communicator run in call order, and none waits for another communicator's.
//
// Where the transport allows only one thread, the driver is the progress thread. Elsewhere it is whoever is there: the
// thread that makes a call gives the first turns, and one that waits for a collective gives further ones, so that a
// small collective costs no switch of threads. The progress thread comes in where peers need this rank while nobody
// waits. It leaves alone what peers need nothing more for, and looks after it only now and then.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "zc/comm/backoff.h"
#include "zc/comm/communicator.h"
#include "zc/comm/liveness.h"
#include "zc/comm/task.h"
#include "zc/comm/transport.h"
#include "zc/comm/work.h"

namespace zc::comm {

class Endpoint final : public Driver {
 public:
  using Clock = std::chrono::steady_clock;

  // The last pointer to it ends the progress thread; collectives still in flight fail. Call leave() before to let peers
  // know. In a forked child nothing is ended, since the thread is not there, and nothing is locked, since the thread
  // may have held the lock.
  static std::shared_ptr<Endpoint> open(std::unique_ptr<Transport> transport);

  Transport& transport() { return *transport_; }

  // --- From any thread.

  void check_process() const;  // throws kComm in a forked child, which has no progress thread

  // The driver runs the task that `start` returns, after those posted for this context before. Neither may throw. Not
  // in a forked child.
  void post(int context, std::function<Task()> start);

  bool takes_help() const { return doorbell_ != nullptr; }
  void drive(Work::State& state, Clock::time_point deadline) override;

  void set_activity(std::string_view activity);
  std::string activity() const;

  // Peers that `liveness` finds dead are lost from then on. Once.
  void watch(std::unique_ptr<Liveness> liveness);

  void promise_place();
  bool place_wanted();
  void tell_place(std::string_view place);

  void leave(Departure departure, std::string_view reason, std::chrono::milliseconds grace) noexcept;
  // As if a collective of this rank had failed. The first failure counts.
  void announce_failure(const std::string& reason) noexcept;

  void look_for_failures();  // takes what peers have announced; soon

  std::string failure() const;  // this rank's own first failure, else a peer's

  // Message tags for the communicators made by split: the lowest number not in use, and to take one.
  int next_context() const { return next_context_; }
  void take_context(int context);

  // --- By the driver.

  // Names one collective of one communicator.
  struct CallId {
    int context = 0;
    std::uint64_t sequence = 0;
    friend bool operator==(const CallId&, const CallId&) = default;
  };

  // What one peer announced, or what became of it.
  struct Peer {
    // kFailed: still there, but its communicators are broken. kDied: its process is gone, unannounced.
    enum class State { kPresent, kFailed, kEnded, kRaised, kDied };
    State state = State::kPresent;
    std::string reason;
    std::string place;           // in its caller's code, where it told that
    std::vector<CallId> broken;  // the calls that it had entered and did not finish
    int order = 0;               // 1 for the first news that arrived, and so on
    bool gone() const { return state == State::kEnded || state == State::kRaised || died(); }
    bool died() const { return state == State::kDied; }
  };
  const Peer& peer(int rank) const { return peers_[static_cast<std::size_t>(rank)].peer; }

  void poll();  // looks for announcements and deaths

  // A collective begins: after check_usable(). Ends with finish() or give_up().
  void enter(const CallId& call);
  void finish(const CallId& call) { std::erase(entered_, call); }

  // Unless the rank is leaving anyway, `reason` is announced as its failure, with all calls under way: none of them is
  // finished any more. The first one counts. Returns it with the places of all ranks as far as they tell; those in
  // `also_failing` are given a moment for that.
  std::string give_up(const CallId& call, const std::string& reason, std::span<const int> also_failing) noexcept;

  // Throws when this rank has failed or left.
  void check_usable() const;
  bool has_failed() const { return failed_; }

  // What a task tells before it suspends; decides when the thread may sleep.
  void note_progress() { progress_ = true; }
  void note_transfer() { transfer_ = true; }  // its peers are all there: data is on its way
  void note_owing() { owes_ = true; }         // peers need more of this rank for it to end
  bool rested() const { return rested_; }     // time has passed since the last turn

  bool leaving() const { return leaving_; }
  Clock::time_point leave_deadline() const;

 private:
  // In one announcement. Peers in a call beyond these find out by their own timeouts.
  static constexpr std::size_t kMaxBroken = 32;
  static constexpr std::size_t kPlaceBytes = 160;

  struct Announcement {
    Peer::State state;
    int num_broken;
    CallId broken[kMaxBroken];
    char text[1000];
    char place[kPlaceBytes];
  };
  struct Slot {
    Peer peer;
    Announcement incoming;
    Transport::Request request = nullptr;
  };
  struct Outgoing {
    int rank;
    std::unique_ptr<Announcement> message;
    Transport::Request request = nullptr;
  };

  struct Posted {
    explicit Posted(std::function<Task()> start) : start(std::move(start)) {}
    std::function<Task()> start;
    std::optional<Task> task{};                               // once started; uses what `start` holds
    enum class Stage : std::uint8_t { kNew, kOwing, kIdle };  // kIdle: peers need nothing more for it
    std::atomic<Stage> stage{Stage::kNew};
    bool done() const { return task && task->done(); }
  };

  explicit Endpoint(std::unique_ptr<Transport> transport);
  ~Endpoint() override;
  bool forked() const;  // this process is a child of the one that opened the endpoint
  void run();
  void rest(std::unique_lock<std::mutex>& lock);
  template <class Enough>
  void give_turns(Enough enough);
  void give_round();
  void sleep(std::chrono::microseconds time);
  bool take_driver();
  void give_driver();
  bool any_in(Posted::Stage stage) const;
  bool is_needed() const;
  void listen(int rank);
  void take(Slot& slot, int rank);
  void bury_dead();
  void note(Peer& peer, int rank);
  void announce(Peer::State state, std::string_view reason, std::string_view place);
  std::string ask_place();
  std::string places(std::span<const int> also_failing);
  bool sent();  // all announcements have gone out to who lives
  void say_goodbye();
  void close() noexcept;

  const std::unique_ptr<Transport> transport_;
  Doorbell* const doorbell_;
  const pid_t process_id_;
  std::unique_ptr<Liveness> owned_liveness_;
  std::atomic<Liveness*> liveness_{nullptr};  // null: nobody watches

  std::mutex driver_;  // held by the driver; guards what follows
  std::vector<Slot> peers_;
  std::vector<Outgoing> outgoing_;
  int num_news_ = 0;
  int num_buried_ = 0;
  std::vector<CallId> entered_;  // and not ended
  std::vector<CallId> broken_;
  bool failed_ = false;
  std::vector<Posted*> turns_;   // the first of each queue
  Doorbell::Ticket ticket_ = 0;  // from before this round
  Backoff backoff_;
  bool progress_ = false;  // in this round of turns
  bool transfer_ = false;
  bool any_owes_ = false;
  bool owes_ = false;  // in this turn
  bool rested_ = false;

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::condition_variable goodbye_said_;
  std::condition_variable place_asked_;
  std::condition_variable place_told_;
  std::map<int, std::deque<Posted>> queues_;  // by context, none empty; only the driver looks into the first
  std::optional<Peer::State> goodbye_;        // to be said
  std::string activity_;
  std::string own_failure_;
  std::string peer_failure_;
  std::string left_;
  std::string place_;  // the first one told
  bool place_wanted_ = false;
  bool place_promised_ = false;
  Clock::time_point leave_deadline_;
  bool stop_ = false;
  bool dozing_ = false;  // the progress thread sleeps until it is woken
  bool called_ = false;  // it is to drive
  bool goodbye_done_ = false;

  std::atomic<bool> news_{false};    // the first of a queue is another
  std::atomic<int> num_waiting_{0};  // threads that wait while another drives
  std::atomic<bool> leaving_{false};
  std::atomic<int> next_context_{1};
  std::thread thread_;
};

}  // namespace zc::comm
