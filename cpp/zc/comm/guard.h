// Makes the ranks of one group meet at the head of a collective, and watches them until its end: nothing of theirs is
// touched before all are known to be in the same call, and no wait lasts longer than the timeout.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "zc/comm/call_header.h"
#include "zc/comm/endpoint.h"
#include "zc/comm/task.h"

namespace zc::comm {

// All members are called by the endpoint's driver, except the constructor. One collective at a time.
class Guard {
 public:
  // ranks: the members' ranks in the job, in group order; index: this rank's place among them.
  Guard(Endpoint& endpoint, std::vector<int> ranks, int index, int context);
  ~Guard();

  int size() const { return static_cast<int>(ranks_.size()); }
  int index() const { return index_; }

  // Exchanges headers, with up to kInlineBytes of payload, and compares them. Throws kComm when the ranks are not all
  // in this call. owes: peers need more of this rank than the header and the payload.
  Task meet(const CallHeader& header, std::span<const std::byte> payload, std::chrono::milliseconds timeout, bool owes);

  // The payload that member `index` brought to the last meet().
  const std::byte* payload(int index) const { return heard(index).payload.data(); }

  std::int64_t latest_turn() const;  // of all members that came to the last meet()

  // Whether member `index` has told where the memory that it gives lies.
  bool has_place(int index) const { return heard(index).header.place.segment != 0; }

  // Where that memory is mapped here: of member `from`, or of all others, at (*mapped)[member].
  Task map(std::vector<const std::byte*>* mapped, int from);
  static constexpr int kAll = -1;

  void check_peers();  // throws kComm when one has given this call up

  Task give_way();  // to the rank's other communicators

  // Transfers of the current call, in a lane: a set of transfers that are waited for together. Payload lanes are
  // numbered from 0.
  static constexpr std::size_t kNumLanes = 4;
  void send(std::size_t lane, int index, const void* data, std::int64_t bytes);
  void receive(std::size_t lane, int index, void* data, std::int64_t bytes);
  Task wait(std::size_t lane, bool owes = true);  // throws kComm when a peer is lost

  // After a failure: the ranks that came to the call and must find that it has failed, too.
  std::vector<int> also_failing() const;

  // After a failure: gives up all transfers, so that the caller's memory is its own again.
  void cancel_all() noexcept;

 private:
  using Clock = Endpoint::Clock;
  using Lane = std::vector<Transport::Request>;
  enum class Progress { kNone, kSome, kDone };
  struct Member {
    bool arrived = false;
    bool seen = false;  // `last` holds where the member was last
    CallHeader last;
    Transport::Request receive = nullptr;
  };
  struct Buffers {  // what the transport reads and writes
    Envelope own;
    std::vector<Envelope> heard;
  };

  template <class Poll>
  Task wait_until(bool meeting, bool owes, Poll poll);
  Progress poll_meeting();
  void check_patience(bool meeting, Clock::duration waited);
  bool same_call() const;
  const Endpoint::Peer* lost_peer(bool stuck, int* index) const;
  bool broke_this_call(const Endpoint::Peer& peer) const;

  [[noreturn]] void fail_different() const;
  [[noreturn]] void fail_lost(const Endpoint::Peer& peer, int index) const;
  [[noreturn]] void fail_timeout(bool meeting) const;
  std::string where(int index, bool detailed) const;
  std::string where_all(bool detailed, int except) const;
  std::string rank_name(int index) const;

  const Envelope& heard(int index) const { return buffers_->heard[static_cast<std::size_t>(index)]; }
  bool is_self(std::size_t index) const { return static_cast<int>(index) == index_; }

  Endpoint& endpoint_;
  std::vector<int> ranks_;
  int index_;
  int context_;
  int header_tag_;
  int payload_tag_;
  std::chrono::milliseconds timeout_{0};
  std::vector<Member> members_;
  std::unique_ptr<Buffers> buffers_;
  Lane header_sends_;
  std::array<Lane, kNumLanes> lanes_;
};

}  // namespace zc::comm
