#include "zc/cuda/in_flight.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <set>
#include <thread>

#include "zc/base/error.h"
#include "zc/cuda/backend.h"
#include "zc/cuda/cuda_device.h"

namespace zc::cuda {
namespace {

constexpr std::chrono::microseconds kPoll{200};
constexpr std::chrono::microseconds kWaitersPoll{50};
// A collective that takes no longer is not asked about.
constexpr std::chrono::milliseconds kQuiet{5};
constexpr std::chrono::milliseconds kLookForFailures{100};
// A peer that has failed may have done its part before.
constexpr std::chrono::milliseconds kPeerFailedPatience{500};

using comm::Work;

// Both threads live as long as the process, since what they wait for may never come.
class Threads {
 public:
  static Threads& instance() {
    static auto& threads = *new Threads;
    return threads;
  }

  void watch(std::shared_ptr<InFlight> rank) {
    const std::lock_guard lock(mutex_);
    watched_.insert(std::move(rank));
    start(watching_, "zc-cuda-watch", [this] { run_watch(); });
    to_watch_.notify_one();
  }

  void drop(std::shared_ptr<void> what) {
    if (what == nullptr) return;
    const std::lock_guard lock(mutex_);
    dropped_.push_back(std::move(what));
    start(dropping_, "zc-cuda-free", [this] { run_drop(); });
    to_drop_.notify_one();
  }

  // On a thread of its own: others' must not wait for it.
  void drop_by_itself(std::shared_ptr<void> what) {
    const std::lock_guard lock(mutex_);
    ++num_alone_;
    std::thread([this, what = std::move(what)]() mutable {
      pthread_setname_np(pthread_self(), "zc-cuda-abort");
      OnDevice::own_thread();
      what.reset();
      const std::lock_guard locked(mutex_);
      if (--num_alone_ == 0) idle_.notify_all();
    }).detach();
  }

  bool wait_until_idle(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    return idle_.wait_for(lock, limit,
                          [this] { return watched_.empty() && dropped_.empty() && !busy_ && num_alone_ == 0; });
  }

 private:
  template <class Run>
  static void start(bool& started, const char* name, Run run) {
    if (std::exchange(started, true)) return;
    std::thread([name, run] {
      pthread_setname_np(pthread_self(), name);
      OnDevice::own_thread();
      run();
    }).detach();
  }

  [[noreturn]] void run_watch() {
    for (;;) {
      std::vector<std::shared_ptr<InFlight>> ranks;
      {
        std::unique_lock lock(mutex_);
        to_watch_.wait(lock, [this] { return !watched_.empty(); });
        ranks.assign(watched_.begin(), watched_.end());
      }
      for (const auto& rank : ranks) rank->look();
      {
        const std::lock_guard lock(mutex_);
        for (const auto& rank : ranks) {
          if (rank->is_empty()) watched_.erase(rank);  // who adds to it from now on has it watched again
        }
      }
      for (auto& rank : ranks) drop(std::move(rank));
      std::this_thread::sleep_for(kPoll);
    }
  }

  [[noreturn]] void run_drop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (dropped_.empty()) idle_.notify_all();
      to_drop_.wait(lock, [this] { return !dropped_.empty(); });
      std::vector<std::shared_ptr<void>> now = std::exchange(dropped_, {});
      busy_ = true;
      lock.unlock();
      now.clear();
      lock.lock();
      busy_ = false;
    }
  }

  std::mutex mutex_;
  std::condition_variable to_watch_, to_drop_, idle_;
  std::set<std::shared_ptr<InFlight>> watched_;
  std::vector<std::shared_ptr<void>> dropped_;
  int num_alone_ = 0;
  bool watching_ = false, dropping_ = false, busy_ = false;
};

// Why a collective has failed; news to the peers, or known from them.
struct Failure {
  std::string reason;
  bool is_news;
};

// What was to be kept for the collective.
std::shared_ptr<void> take_kept(Work::State& state) {
  const std::lock_guard lock(state.mutex);
  return std::move(state.kept);
}

}  // namespace

void drop_elsewhere(std::shared_ptr<void> what) { Threads::instance().drop(std::move(what)); }

void drop_by_itself(std::shared_ptr<void> what) { Threads::instance().drop_by_itself(std::move(what)); }

bool wait_until_idle(std::chrono::milliseconds limit) { return Threads::instance().wait_until_idle(limit); }

void InFlight::join(const std::shared_ptr<Group>& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& weak) { return weak.expired(); });
  groups_.push_back(group);
}

void InFlight::add(const std::shared_ptr<Group>& group, Flight flight) {
  auto entry = std::make_shared<Entry>();
  static_cast<Flight&>(*entry) = std::move(flight);
  entry->since = Clock::now();
  std::string failed;
  {
    const std::lock_guard lock(mutex_);
    failed = failure_;
    if (failed.empty()) {
      Queue& queue = queues_[group.get()];
      queue.group = group;
      queue.entries.push_back(entry);
    }
  }
  if (failed.empty()) return Threads::instance().watch(shared_from_this());
  entry->state->complete(Error(ErrorKind::kComm, failed));
  drop_elsewhere(std::move(entry));
}

std::string InFlight::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool InFlight::is_empty() const {
  const std::lock_guard lock(mutex_);
  return queues_.empty();
}

void InFlight::check() const {
  const std::string reason = failure();
  ZC_CHECK(reason.empty(), kComm, reason);
}

void InFlight::fail(const std::string& reason, bool announce) {
  // What runs on the device reads and writes the memory of its collectives until the groups have been aborted. All at
  // once: to abort one frees memory, which waits for the whole device, and so for the others.
  struct Remains {
    std::vector<std::shared_ptr<Group>> groups;
    std::vector<std::shared_ptr<void>> memory;
    ~Remains() {
      std::vector<std::thread> threads;
      for (const auto& group : groups) threads.emplace_back([&group] { group->abort(); });
      for (std::thread& thread : threads) thread.join();
    }
  };
  auto remains = std::make_shared<Remains>();
  std::map<Group*, Queue> queues;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = reason;
    queues.swap(queues_);
    for (const auto& weak : groups_) {
      if (auto group = weak.lock()) remains->groups.push_back(std::move(group));
    }
  }
  if (announce) host_->announce_failure(reason);
  for (auto& [group, queue] : queues) {
    for (auto& entry : queue.entries) {
      remains->memory.push_back(take_kept(*entry->state));
      entry->state->complete(Error(ErrorKind::kComm, reason));
      remains->memory.push_back(std::move(entry));
    }
  }
  drop_by_itself(std::move(remains));
}

// One after the other of each group, since they end in order.
void InFlight::look() {
  const std::unique_lock looking(looking_, std::try_to_lock);
  if (!looking) return;
  std::vector<std::pair<std::shared_ptr<Group>, std::shared_ptr<Entry>>> first;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [group, queue] : queues_) first.emplace_back(queue.group, queue.entries.front());
  }
  auto memory = std::make_shared<std::vector<std::shared_ptr<void>>>();
  for (auto& [group, entry] : first) {
    try {
      while (entry != nullptr && has_ended(*group, *entry)) {
        memory->push_back(take_kept(*entry->state));
        memory->push_back(entry);
        entry->state->complete();
        entry = next_of(*group);
      }
    } catch (const Failure& failure) {
      memory->push_back(entry);
      fail(failure.reason, failure.is_news);
      break;
    }
  }
  if (memory->empty()) return;
  for (auto& [group, entry] : first) {
    memory->push_back(std::move(group));
    memory->push_back(std::move(entry));
  }
  drop_elsewhere(std::move(memory));
}

// The first of a group has ended: the one after it, or null.
std::shared_ptr<InFlight::Entry> InFlight::next_of(Group& group) {
  const std::lock_guard lock(mutex_);
  const auto at = queues_.find(&group);
  if (at == queues_.end()) return nullptr;  // all have failed meanwhile
  auto& entries = at->second.entries;
  entries.pop_front();
  if (entries.empty()) {
    queues_.erase(at);
    return nullptr;
  }
  entries.front()->since = Clock::now();
  return entries.front();
}

bool InFlight::has_ended(Group& group, Entry& entry) {
  const auto now = Clock::now();
  if (!entry.ended) {
    try {
      entry.ended = entry.state->event->done();
    } catch (const Error& error) {
      throw Failure{error.what(), true};
    }
    if (!entry.ended && now - entry.since < kQuiet) return false;
  }
  if (!entry.met) {
    try {
      entry.met = entry.meeting.done();
      if (entry.met) entry.meeting.wait();
    } catch (const Error& error) {
      throw Failure{error.what(), false};
    }
    if (entry.met) entry.since = now;
  }
  if (!entry.ended) check_quiet(group, entry, now);
  return entry.ended && entry.met;
}

// A collective that takes long.
void InFlight::check_quiet(Group& group, const Entry& entry, Clock::time_point now) {
  if (const std::string error = group.error(); !error.empty()) {
    throw Failure{
        concat("[cuda] ", error, " in ", entry.label, ". Look at the output of all ranks, with NCCL_DEBUG=INFO."),
        true};
  }
  if (now - looked_for_failures_ > kLookForFailures) {
    looked_for_failures_ = now;
    host_->look_for_failures();
  }
  if (const std::string failure = host_->failure(); !failure.empty()) {
    if (!peer_failed_) peer_failed_ = now;
    if (now - *peer_failed_ > kPeerFailedPatience) throw Failure{failure, false};
  }
  if (!entry.met || now - entry.since <= entry.timeout) return;
  const double seconds = static_cast<double>(entry.timeout.count()) / 1000;
  throw Failure{concat("[cuda] timed out after ", seconds, " s in ", entry.label,
                       ": all ranks have called it, and it has not ended on this rank's device. Look at what the other "
                       "ranks' devices do, and at the links between them; if they are only slow, raise "
                       "comm.timeout_ms, now ",
                       entry.timeout.count(), "."),
                true};
}

void InFlight::drive(Work::State& state, Clock::time_point deadline) {
  do {
    look();
    if (state.done) return;
    std::unique_lock lock(state.mutex);
    const auto until = std::min(deadline, Clock::now() + kWaitersPoll);
    state.finished.wait_until(lock, until, [&state] { return state.done.load(); });
  } while (!state.done && Clock::now() < deadline);
}

}  // namespace zc::cuda
