#include "zc/comm/guard.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "zc/base/error.h"

namespace zc::comm {
namespace {

// Once a peer is known to be lost, or calls to differ, the others get this long to say where they are, and the header
// that a peer sent before it left gets this long to arrive.
constexpr std::chrono::milliseconds kMeetingPatience{500};

constexpr unsigned kPollsBetweenAnnouncements = 32;

// How a lost peer was lost; its reason follows.
const char* how(const Endpoint::Peer& peer) {
  if (peer.died()) return " has died (";
  return peer.gone() ? " has left (" : " reports a failure (";
}

}  // namespace

Guard::Guard(Endpoint& endpoint, std::vector<int> ranks, int index, int context)
    : endpoint_(endpoint),
      ranks_(std::move(ranks)),
      index_(index),
      context_(context),
      header_tag_(2 * context),
      payload_tag_(2 * context + 1),
      members_(ranks_.size()),
      buffers_(std::make_unique<Buffers>()) {
  buffers_->heard.resize(ranks_.size());
}

Guard::~Guard() = default;

Task Guard::meet(const CallHeader& header, std::span<const std::byte> payload, std::chrono::milliseconds timeout,
                 bool owes) {
  timeout_ = timeout;
  Envelope& own = buffers_->own;
  own.header = header;
  if (!payload.empty()) std::memcpy(own.payload.data(), payload.data(), payload.size());
  buffers_->heard[static_cast<std::size_t>(index_)] = own;
  const auto bytes = static_cast<std::int64_t>(offsetof(Envelope, payload) + payload.size());

  Transport& transport = endpoint_.transport();
  for (std::size_t i = 0; i < members_.size(); ++i) {
    members_[i].arrived = is_self(i);
    if (is_self(i)) continue;
    members_[i].receive = transport.receive(ranks_[i], &buffers_->heard[i], sizeof(Envelope), header_tag_);
  }
  for (std::size_t step = 1; step < members_.size(); ++step) {
    const std::size_t i = (static_cast<std::size_t>(index_) + step) % members_.size();
    header_sends_.push_back(transport.send(ranks_[i], &own, bytes, header_tag_));
  }
  owes = owes || std::ranges::any_of(header_sends_, [](Transport::Request request) { return request != nullptr; });
  co_await wait_until(true, owes, [this] { return poll_meeting(); });

  check_peers();  // a rank that comes late finds the headers of peers that have given this call up meanwhile
}

std::int64_t Guard::latest_turn() const {
  std::int64_t latest = 0;
  for (int i = 0; i < size(); ++i) latest = std::max(latest, heard(i).header.turn);
  return latest;
}

void Guard::check_peers() {
  endpoint_.poll();
  int index = 0;
  if (const Endpoint::Peer* peer = lost_peer(false, &index)) fail_lost(*peer, index);
}

Guard::Progress Guard::poll_meeting() {
  Transport& transport = endpoint_.transport();
  auto progress = Progress::kNone;
  bool all = true;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    Member& member = members_[i];
    if (member.arrived) continue;
    if (!transport.test(member.receive)) {
      all = false;
      continue;
    }
    member.arrived = member.seen = true;
    member.last = heard(static_cast<int>(i)).header;
    progress = Progress::kSome;
  }
  if (!all) return progress;
  if (!same_call()) fail_different();
  for (Transport::Request& request : header_sends_) all = transport.test(request) && all;
  if (!all) return progress;
  header_sends_.clear();
  return Progress::kDone;
}

Task Guard::map(std::vector<const std::byte*>* mapped, int from) {
  return wait_until(false, true, [this, mapped, from] {
    bool all = true;
    for (int i = 0; i < size(); ++i) {
      const std::byte*& memory = (*mapped)[static_cast<std::size_t>(i)];
      if (i == index_ || memory != nullptr || (from != kAll && i != from)) continue;
      memory = endpoint_.transport().map(ranks_[static_cast<std::size_t>(i)], heard(i).header.place);
      all = all && memory != nullptr;
    }
    return all ? Progress::kDone : Progress::kNone;
  });
}

Task Guard::give_way() {
  return wait_until(false, true, [given = false]() mutable {
    return std::exchange(given, true) ? Progress::kDone : Progress::kSome;
  });
}

void Guard::send(std::size_t lane, int index, const void* data, std::int64_t bytes) {
  const int rank = ranks_[static_cast<std::size_t>(index)];
  lanes_[lane].push_back(endpoint_.transport().send(rank, data, bytes, payload_tag_));
}

void Guard::receive(std::size_t lane, int index, void* data, std::int64_t bytes) {
  const int rank = ranks_[static_cast<std::size_t>(index)];
  lanes_[lane].push_back(endpoint_.transport().receive(rank, data, bytes, payload_tag_));
}

Task Guard::wait(std::size_t lane, bool owes) {
  return wait_until(false, owes, [this, &requests = lanes_[lane]] {
    const std::size_t before = requests.size();
    std::erase_if(requests, [this](Transport::Request& request) { return endpoint_.transport().test(request); });
    if (requests.empty()) return Progress::kDone;
    return requests.size() < before ? Progress::kSome : Progress::kNone;
  });
}

// Suspends after each poll, so that the collectives of the rank's other communicators are polled too.
template <class Poll>
Task Guard::wait_until(bool meeting, bool owes, Poll poll) {
  auto last_progress = Clock::now();
  for (unsigned count = 0;; ++count) {
    const auto now = Clock::now();  // before polling: what arrived while this thread was not running still counts
    const Progress progress = poll();
    if (progress != Progress::kNone) {
      last_progress = now;
      endpoint_.note_progress();
    }
    if (progress == Progress::kDone) co_return;
    if (progress == Progress::kNone) {
      if (count % kPollsBetweenAnnouncements == 0 || endpoint_.rested()) endpoint_.poll();
      check_patience(meeting, now - last_progress);
    }
    if (!meeting) endpoint_.note_transfer();
    if (owes) endpoint_.note_owing();
    co_await std::suspend_always{};
    if (endpoint_.has_failed()) endpoint_.check_usable();
  }
}

void Guard::check_patience(bool meeting, Clock::duration waited) {
  if (endpoint_.leaving() && (meeting || Clock::now() > endpoint_.leave_deadline())) endpoint_.check_usable();
  int index = 0;
  if (!meeting || waited > std::min(kMeetingPatience, timeout_)) {
    if (meeting && !same_call()) fail_different();
    const bool stuck = waited > kMeetingPatience;
    if (const Endpoint::Peer* peer = lost_peer(stuck, &index)) fail_lost(*peer, index);
  }
  if (waited > timeout_) fail_timeout(meeting);
}

bool Guard::same_call() const {
  for (int i = 0; i < size(); ++i) {
    if (members_[static_cast<std::size_t>(i)].arrived &&
        heard(i).header.fingerprint != buffers_->own.header.fingerprint) {
      return false;
    }
  }
  return true;
}

bool Guard::broke_this_call(const Endpoint::Peer& peer) const {
  return std::ranges::find(peer.broken, Endpoint::CallId{context_, buffers_->own.header.sequence}) != peer.broken.end();
}

// The peer because of which this call cannot be finished: it is lost before it came, or gave this very call up. (One
// that came and is lost otherwise has finished the call; but one that has died may have done so in the middle, which
// shows when the call is stuck.) Of several, the one to blame: one that died or raised before one that merely ended,
// and that before one that only reports a failure; of equals, the first.
const Endpoint::Peer* Guard::lost_peer(bool stuck, int* index) const {
  using State = Endpoint::Peer::State;
  const Endpoint::Peer* found = nullptr;
  const auto weight = [](const Endpoint::Peer& peer) {
    const State state = peer.died() ? State::kRaised : peer.state;
    return std::pair(static_cast<int>(state), -peer.order);
  };
  for (int i = 0; i < size(); ++i) {
    const Endpoint::Peer& peer = endpoint_.peer(ranks_[static_cast<std::size_t>(i)]);
    if (peer.state == Endpoint::Peer::State::kPresent) continue;
    const bool may_be_in_it = peer.died() && stuck;
    if (members_[static_cast<std::size_t>(i)].arrived && !broke_this_call(peer) && !may_be_in_it) continue;
    if (found != nullptr && weight(peer) <= weight(*found)) continue;
    found = &peer;
    *index = i;
  }
  return found;
}

std::vector<int> Guard::also_failing() const {
  std::vector<int> found;
  for (std::size_t i = 0; i < members_.size(); ++i) {
    if (members_[i].arrived && !is_self(i)) found.push_back(ranks_[i]);
  }
  return found;
}

void Guard::cancel_all() noexcept {
  Transport& transport = endpoint_.transport();
  bool own_again = true;
  for (Transport::Request& request : header_sends_) own_again = transport.cancel(request) && own_again;
  header_sends_.clear();
  for (Member& member : members_) transport.cancel(member.receive);
  for (Lane& lane : lanes_) {
    for (Transport::Request& request : lane) transport.cancel(request);
    lane.clear();
  }
  if (!own_again) buffers_.release();  // no collective follows on a broken communicator
}

// --- Messages

std::string Guard::rank_name(int index) const { return concat("rank ", ranks_[static_cast<std::size_t>(index)]); }

std::string Guard::where(int index, bool detailed) const {
  const Member& member = members_[static_cast<std::size_t>(index)];
  const Endpoint::Peer& peer = endpoint_.peer(ranks_[static_cast<std::size_t>(index)]);
  const auto text = [detailed](const CallHeader& header) {
    return detailed ? describe_call(header) : describe(header);
  };
  if (member.arrived && !peer.died()) return concat(rank_name(index), " is in ", text(heard(index).header));
  if (peer.gone()) return concat(rank_name(index), how(peer), peer.reason, ")");
  if (member.seen) return concat(rank_name(index), " has not arrived (it was last in ", text(member.last), ")");
  return concat(rank_name(index), " has not arrived");
}

std::string Guard::where_all(bool detailed, int except) const {
  std::string list;
  for (int i = 0; i < size(); ++i) {
    if (i == except) continue;
    if (!list.empty()) list += "; ";
    list += where(i, detailed);
    if (i == index_) list += " (this rank)";
  }
  return list;
}

void Guard::fail_different() const {
  fail(ErrorKind::kComm, "[comm] ranks are in different collectives: ", where_all(true, -1),
       ". Every rank must make the same calls in the same order, with the same sizes: look for code that depends on "
       "the rank.");
}

void Guard::fail_lost(const Endpoint::Peer& peer, int index) const {
  fail(ErrorKind::kComm, "[comm] ", rank_name(index), how(peer), peer.reason,
       ") while others need it: ", where_all(false, peer.gone() ? index : -1), ". Look at the output of ",
       rank_name(index), " first.");
}

void Guard::fail_timeout(bool meeting) const {
  std::string missing;
  for (int i = 0; i < size(); ++i) {
    if (members_[static_cast<std::size_t>(i)].arrived) continue;
    missing += missing.empty() ? rank_name(i) : concat(", ", rank_name(i));
  }
  const double seconds = static_cast<double>(timeout_.count()) / 1000;
  if (!meeting) missing = "data of a peer";
  fail(ErrorKind::kComm, "[comm] timed out after ", seconds, " s in ", describe(buffers_->own.header), ": ", missing,
       " did not arrive. ", where_all(false, -1),
       ". If a rank is alive but slow (loading, compiling, saving), raise comm.timeout_ms, now ", timeout_.count(),
       "; otherwise look at the output of the rank that is missing.");
}

}  // namespace zc::comm
