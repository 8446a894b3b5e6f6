#include "zc/comm/endpoint.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "zc/base/error.h"
#include "zc/base/float_environment.h"
#include "zc/comm/call_header.h"

namespace zc::comm {
namespace {

constexpr int kAnnouncementTag = 0;
constexpr int kNoContext = -1;  // a queue beside those of communicators, all of which may be stuck
constexpr std::chrono::microseconds kGoodbyePoll{200};
constexpr std::chrono::microseconds kPlacesPoll{200};
// A place is asked for, once something has failed, of a thread that may have to wait for others of its process; and
// awaited from peers that are about to find the same failure.
constexpr std::chrono::milliseconds kOwnPlaceLimit{200};
constexpr std::chrono::milliseconds kPlacesLimit{1000};
constexpr std::chrono::microseconds kMeetingYield{50};
constexpr std::chrono::microseconds kTransferYield{2000};
// Peers are often as far as this rank; to wait so long for them is cheaper than to have the progress thread called.
constexpr std::chrono::microseconds kPatience{2};
// The doorbell wakes whoever sleeps; but not for a death, or a timeout.
constexpr std::chrono::milliseconds kLongestNap{10};
constexpr std::chrono::milliseconds kLookPeriod{100};
constexpr std::chrono::hours kDoze{1};  // until the next call

}  // namespace

std::shared_ptr<Endpoint> Endpoint::open(std::unique_ptr<Transport> transport) {
  return {new Endpoint(std::move(transport)), [owner = getpid()](Endpoint* endpoint) {
            if (getpid() == owner) delete endpoint;
          }};
}

Endpoint::Endpoint(std::unique_ptr<Transport> transport)
    : transport_(std::move(transport)),
      doorbell_(transport_->doorbell()),
      process_id_(getpid()),
      peers_(static_cast<std::size_t>(transport_->size())) {
  try {
    for (int rank = 0; rank < transport_->size(); ++rank) listen(rank);
  } catch (const std::exception& error) {
    give_up({}, error.what(), {});
  }
  thread_ = std::thread([this] { run(); });
}

Endpoint::~Endpoint() {
  {
    std::lock_guard lock(mutex_);
    if (left_.empty()) left_ = "its communicator was destroyed";
    leave_deadline_ = Clock::now();
    leaving_ = true;
    stop_ = called_ = true;
    wake_.notify_all();
  }
  if (doorbell_ != nullptr) doorbell_->ring(Doorbell::kSpare);
  thread_.join();
}

bool Endpoint::forked() const { return getpid() != process_id_; }

void Endpoint::check_process() const {
  ZC_CHECK(!forked(), kComm,
           "[comm] a collective was called in a forked child process, which is no rank of the job. Call collectives in "
           "the process that mpirun started; data-loader workers must not.");
}

void Endpoint::post(int context, std::function<Task()> start) {
  bool begun = false;
  {
    std::lock_guard lock(mutex_);
    auto& queue = queues_[context];
    queue.emplace_back(std::move(start));
    begun = queue.size() == 1;
    if (begun) news_ = true;
  }
  if (doorbell_ == nullptr) {
    if (begun) wake_.notify_all();  // else the thread comes to it by itself
    return;
  }
  if (!take_driver()) {
    if (begun) doorbell_->ring();
    return;
  }
  {
    const DefaultFloatEnvironment environment;
    const auto until = Clock::now() + kPatience;
    give_turns([&] { return !progress_ && (!any_owes_ || Clock::now() >= until); });
  }
  give_driver();
}

void Endpoint::drive(Work::State& state, Clock::time_point deadline) {
  check_process();
  const auto enough = [&] { return state.done || Clock::now() >= deadline; };
  do {
    ++num_waiting_;  // from here on, who stops driving calls the progress thread
    if (take_driver()) {
      --num_waiting_;
      {
        const DefaultFloatEnvironment environment;
        if (!state.done) give_turns(enough);
      }
      give_driver();
    } else {
      std::unique_lock lock(state.mutex);
      const auto until = std::min(deadline, Clock::now() + kLongestNap);
      state.finished.wait_until(lock, until, [&state] { return state.done.load(); });
      --num_waiting_;
    }
  } while (!enough());
}

bool Endpoint::take_driver() {
  if (!driver_.try_lock()) return false;
  if (doorbell_ != nullptr) doorbell_->ignore(Doorbell::kSpare);
  return true;
}

// Peers, other threads or later calls may need what nobody drives now. Then the progress thread does: at once, or when
// something arrives.
void Endpoint::give_driver() {
  const Doorbell::Ticket ticket = ticket_;
  driver_.unlock();
  {
    std::lock_guard lock(mutex_);
    called_ = stop_ || goodbye_ || (!queues_.empty() && (leaving_ || num_waiting_ > 0 || any_in(Posted::Stage::kNew)));
    if (!called_ && is_needed()) {
      doorbell_->listen(Doorbell::kSpare);
      called_ = doorbell_->ticket() != ticket;  // something has arrived since the last turns
    }
    if (!called_ && !(dozing_ && !queues_.empty())) return;
  }
  doorbell_->ring(Doorbell::kSpare);
}

bool Endpoint::any_in(Posted::Stage stage) const {
  return std::ranges::any_of(queues_, [stage](const auto& entry) { return entry.second.front().stage == stage; });
}

// Whether somebody must drive although nobody waits. Under mutex_.
bool Endpoint::is_needed() const {
  if (queues_.empty()) return stop_ || goodbye_;
  return stop_ || leaving_ || num_waiting_ > 0 || doorbell_ == nullptr || any_in(Posted::Stage::kNew) ||
         any_in(Posted::Stage::kOwing) ||
         std::ranges::any_of(queues_, [](const auto& entry) { return entry.second.size() > 1; });
}

void Endpoint::run() {
  pthread_setname_np(pthread_self(), "zc-comm");
  const DefaultFloatEnvironment environment;
  std::unique_lock lock(mutex_);
  for (;;) {
    rest(lock);
    if (stop_ && queues_.empty() && !goodbye_) break;
    if (!take_driver()) continue;  // who drives calls, when it stops
    const bool only_looks = !is_needed();
    const bool has_turns = !queues_.empty(), leaves = !has_turns && goodbye_;  // else others have done it all
    lock.unlock();
    if (has_turns) {
      give_turns([this, only_looks] {
        if (only_looks) return !progress_;
        std::lock_guard relock(mutex_);
        return queues_.empty() || !is_needed();
      });
    } else if (leaves) {
      say_goodbye();
    }
    driver_.unlock();
    lock.lock();
    called_ = is_needed();
  }
  lock.unlock();
  close();
}

// Until the progress thread is to drive, or to look after what nobody waits for.
void Endpoint::rest(std::unique_lock<std::mutex>& lock) {
  if (doorbell_ == nullptr) {
    wake_.wait(lock, [this] { return is_needed(); });
    return;
  }
  for (;;) {
    const Doorbell::Ticket ticket = doorbell_->ticket();
    if (std::exchange(called_, false)) return;
    dozing_ = queues_.empty();
    const std::chrono::milliseconds limit = dozing_ ? kDoze : kLookPeriod;
    lock.unlock();
    doorbell_->sleep(ticket, limit, Doorbell::kSpare);
    lock.lock();
    dozing_ = false;
    if (!queues_.empty()) return;
  }
}

// Rounds of turns until enough() after one of them.
template <class Enough>
void Endpoint::give_turns(Enough enough) {
  rested_ = true;
  backoff_.reset(Clock::now());
  for (;;) {
    if (doorbell_ != nullptr) ticket_ = doorbell_->ticket();
    give_round();
    if (enough()) return;
    rested_ = false;
    const auto now = Clock::now();
    if (progress_ || news_) {
      backoff_.reset(now);
    } else if (const auto time = backoff_.pause(now, transfer_ ? kTransferYield : kMeetingYield); time.count() > 0) {
      sleep(time);
    }
  }
}

void Endpoint::give_round() {
  progress_ = transfer_ = any_owes_ = false;
  if (news_.exchange(false)) {
    std::lock_guard lock(mutex_);
    turns_.clear();
    for (auto& [context, queue] : queues_) turns_.push_back(&queue.front());
  }
  bool ended = false;
  for (Posted* posted : turns_) {
    owes_ = false;
    if (posted->task) {
      posted->task->resume();
    } else {
      posted->task = posted->start();
      progress_ = true;
    }
    any_owes_ = any_owes_ || owes_;
    posted->stage = owes_ ? Posted::Stage::kOwing : Posted::Stage::kIdle;
    ended = ended || posted->done();
  }
  if (!ended) return;
  progress_ = true;
  std::lock_guard lock(mutex_);
  for (auto entry = queues_.begin(); entry != queues_.end();) {
    auto& queue = entry->second;
    if (queue.front().done()) queue.pop_front();
    entry = queue.empty() ? queues_.erase(entry) : std::next(entry);
  }
  news_ = true;
}

void Endpoint::sleep(std::chrono::microseconds time) {
  if (doorbell_ != nullptr) {
    doorbell_->listen(Doorbell::kDriver);
    doorbell_->sleep(ticket_, kLongestNap, Doorbell::kDriver);
    doorbell_->ignore(Doorbell::kDriver);
    rested_ = true;
  } else {
    std::unique_lock lock(mutex_);
    wake_.wait_for(lock, time, [this] { return news_.load(); });
  }
}

void Endpoint::set_activity(std::string_view activity) {
  if (forked()) return;
  std::lock_guard lock(mutex_);
  activity_.assign(activity.substr(0, sizeof(CallHeader::activity)));
}

std::string Endpoint::activity() const {
  std::lock_guard lock(mutex_);
  return activity_;
}

void Endpoint::take_context(int context) {
  ZC_CHECK(2 * context + 1 <= Transport::kMaxTag, kUnsupported, "[comm] too many communicators: got number ", context,
           ", expected at most ", Transport::kMaxTag / 2, ". Make groups once and keep them.");
  next_context_ = context + 1;
}

// --- Announcements

void Endpoint::listen(int rank) {
  if (rank == transport_->rank()) return;
  Slot& slot = peers_[static_cast<std::size_t>(rank)];
  slot.request = transport_->receive(rank, &slot.incoming, sizeof slot.incoming, kAnnouncementTag);
}

void Endpoint::watch(std::unique_ptr<Liveness> liveness) {
  owned_liveness_ = std::move(liveness);
  liveness_ = owned_liveness_.get();
}

void Endpoint::poll() {
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    Slot& slot = peers_[rank];
    while (slot.request != nullptr && transport_->test(slot.request)) {
      take(slot, static_cast<int>(rank));
      if (!slot.peer.gone()) listen(static_cast<int>(rank));
    }
  }
  const Liveness* liveness = liveness_;
  if (liveness != nullptr && liveness->num_dead() > num_buried_) bury_dead();
}

void Endpoint::take(Slot& slot, int rank) {
  Peer& peer = slot.peer;
  peer.state = slot.incoming.state;
  peer.reason = text_of(slot.incoming.text);
  if (const auto place = text_of(slot.incoming.place); !place.empty()) peer.place = place;
  peer.broken.assign(slot.incoming.broken, slot.incoming.broken + slot.incoming.num_broken);
  note(peer, rank);
}

// After its announcements have been taken: one that raised or ended did not die of it.
void Endpoint::bury_dead() {
  num_buried_ = liveness_.load()->num_dead();
  for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
    Peer& peer = peers_[rank].peer;
    if (peer.gone() || !liveness_.load()->is_dead(static_cast<int>(rank))) continue;
    const std::string before = peer.state == Peer::State::kFailed ? concat(", after ", peer.reason) : "";
    peer.state = Peer::State::kDied;
    peer.reason = concat("its process is gone: killed or crashed", before);
    note(peer, static_cast<int>(rank));
  }
}

void Endpoint::note(Peer& peer, int rank) {
  if (peer.order == 0) peer.order = ++num_news_;
  if (peer.state == Peer::State::kEnded) return;
  std::lock_guard lock(mutex_);
  if (peer_failure_.empty()) peer_failure_ = concat("[comm] rank ", rank, " has failed: ", peer.reason);
}

void Endpoint::announce(Peer::State state, std::string_view reason, std::string_view place) {
  for (int rank = 0; rank < transport_->size(); ++rank) {
    if (rank == transport_->rank()) continue;  // one that has left may be waiting for this
    Outgoing& out = outgoing_.emplace_back();
    out.rank = rank;
    out.message = std::make_unique<Announcement>();
    out.message->state = state;
    out.message->num_broken = static_cast<int>(std::min(broken_.size(), kMaxBroken));
    std::copy_n(broken_.begin(), out.message->num_broken, out.message->broken);
    copy_text(reason, out.message->text);
    copy_text(place, out.message->place);
    out.request = transport_->send(rank, out.message.get(), sizeof(Announcement), kAnnouncementTag);
  }
}

bool Endpoint::sent() {
  bool all = true;
  for (Outgoing& out : outgoing_) all = (peer(out.rank).died() || transport_->test(out.request)) && all;
  return all;
}

std::string Endpoint::give_up(const CallId& call, const std::string& reason,
                              std::span<const int> also_failing) noexcept {
  try {
    if (failed_) return reason;
    if (leaving_) {  // the goodbye says it
      if (std::erase(entered_, call) > 0) broken_.push_back(call);
      return reason;
    }
    {
      std::lock_guard lock(mutex_);
      own_failure_ = reason;
    }
    failed_ = true;
    broken_ = std::exchange(entered_, {});
    announce(Peer::State::kFailed, reason, ask_place());
    const std::string text = concat(reason, places(also_failing));
    std::lock_guard lock(mutex_);
    own_failure_ = text;
    return text;
  } catch (...) {  // the transport is what failed: peers find out by their own timeouts
    return reason;
  }
}

void Endpoint::look_for_failures() {
  if (forked()) return;
  post(kNoContext, [this]() -> Task {
    poll();
    co_return;
  });
}

void Endpoint::announce_failure(const std::string& reason) noexcept {
  try {
    if (forked()) return;
    post(kNoContext, [this, reason]() -> Task {
      give_up({}, reason, {});
      co_return;
    });
  } catch (...) {  // no memory left for it: peers find out by their own timeouts
  }
}

// --- Places

void Endpoint::promise_place() {
  std::lock_guard lock(mutex_);
  place_promised_ = true;
}

bool Endpoint::place_wanted() {
  if (forked()) return false;
  std::unique_lock lock(mutex_);
  place_asked_.wait(lock, [this] { return place_wanted_ || leaving_; });
  return std::exchange(place_wanted_, false);
}

void Endpoint::tell_place(std::string_view place) {
  if (forked()) return;
  std::lock_guard lock(mutex_);
  if (place_.empty()) place_.assign(place.substr(0, kPlaceBytes));
  place_told_.notify_all();
}

std::string Endpoint::ask_place() {
  std::unique_lock lock(mutex_);
  if (place_promised_ && place_.empty()) {
    place_wanted_ = true;
    place_asked_.notify_all();
    place_told_.wait_for(lock, kOwnPlaceLimit, [this] { return !place_.empty(); });
    place_wanted_ = false;
  }
  return place_;
}

// " In Python: ...", or nothing where this rank has no place to tell.
std::string Endpoint::places(std::span<const int> also_failing) {
  std::string own;
  {
    std::lock_guard lock(mutex_);
    own = place_;
  }
  if (own.empty()) return {};
  const auto all_told = [&] {
    return std::ranges::all_of(also_failing, [this](int rank) { return peer(rank).state != Peer::State::kPresent; });
  };
  for (const auto deadline = Clock::now() + kPlacesLimit; !all_told() && Clock::now() < deadline;) {
    std::this_thread::sleep_for(kPlacesPoll);
    poll();
  }
  std::string text = " In Python:";
  for (int rank = 0; rank < transport_->size(); ++rank) {
    const bool is_self = rank == transport_->rank();
    const std::string& place = is_self ? own : peer(rank).place;
    if (!place.empty()) text += concat(" rank ", rank, " at ", place, is_self ? " (this rank);" : ";");
  }
  text.back() = '.';
  return text;
}

std::string Endpoint::failure() const {
  if (forked()) return {};
  std::lock_guard lock(mutex_);
  return own_failure_.empty() ? peer_failure_ : own_failure_;
}

void Endpoint::enter(const CallId& call) {
  check_usable();
  entered_.push_back(call);
}

void Endpoint::check_usable() const {
  std::lock_guard lock(mutex_);
  if (!own_failure_.empty()) throw Error(ErrorKind::kComm, own_failure_);
  ZC_CHECK(!leaving_, kComm, "[comm] this rank has left (", left_, "): no collective is possible any more.");
}

// --- Leaving

Endpoint::Clock::time_point Endpoint::leave_deadline() const {
  std::lock_guard lock(mutex_);
  return leave_deadline_;
}

void Endpoint::leave(Departure departure, std::string_view reason, std::chrono::milliseconds grace) noexcept {
  try {
    if (forked()) return;
    const auto deadline = Clock::now() + grace;
    const auto state = departure == Departure::kEnded ? Peer::State::kEnded : Peer::State::kRaised;
    {
      std::lock_guard lock(mutex_);
      if (leaving_) return;
      left_.assign(reason);
      leave_deadline_ = deadline;
      leaving_ = called_ = true;
      goodbye_ = state;
      wake_.notify_all();
      place_asked_.notify_all();
    }
    if (doorbell_ != nullptr) doorbell_->ring(Doorbell::kSpare);
    std::unique_lock lock(mutex_);
    goodbye_said_.wait_until(lock, deadline + std::chrono::seconds(1), [this] { return goodbye_done_; });
  } catch (...) {  // no memory left for a goodbye: peers find out by their own timeouts
  }
}

void Endpoint::say_goodbye() {
  try {
    {
      std::lock_guard lock(mutex_);
      announce(*std::exchange(goodbye_, std::nullopt), left_, place_);
    }
    const auto all_gone = [this] {
      for (int rank = 0; rank < transport_->size(); ++rank) {
        if (rank != transport_->rank() && !peer(rank).gone()) return false;
      }
      return true;
    };
    bool told = false;
    while (Clock::now() < leave_deadline()) {
      poll();
      if (!told && sent()) {  // a peer that has not got the message shall take this rank for dead
        told = true;
        if (Liveness* liveness = liveness_) liveness->goodbye();
      }
      if (told && all_gone()) break;
      std::this_thread::sleep_for(kGoodbyePoll);
    }
  } catch (...) {  // the transport is broken, so there is nobody to wait for
  }
  close();
  std::lock_guard lock(mutex_);
  goodbye_done_ = true;
  goodbye_said_.notify_all();
}

// After this the transport is not called any more.
void Endpoint::close() noexcept {
  for (Slot& slot : peers_) transport_->cancel(slot.request);
  for (Outgoing& out : outgoing_) {
    if (!transport_->cancel(out.request)) out.message.release();  // left to the end of the process
  }
  outgoing_.clear();
}

}  // namespace zc::comm
