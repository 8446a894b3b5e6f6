#include "cuda/simulation.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <string_view>

#include "zc/base/error.h"

namespace zc::cuda {

// One recording of an event.
struct Point {
  SimulatedStream* stream = nullptr;
  bool done = false;
};

struct SimulatedEvent {
  std::shared_ptr<Point> last{};  // null: not recorded yet
};

struct SimulatedItem {
  const char* name = "";
  std::function<void()> run{};
  std::shared_ptr<Point> waits_for{};
  std::shared_ptr<Rendezvous> rendezvous{};
  int member = 0;
  std::shared_ptr<void> kept{};
};

struct SimulatedStream {
  Simulation* simulation = nullptr;
  int device = 0;
  std::deque<SimulatedItem> queue{};
  std::int64_t num_pushed = 0;
  std::int64_t num_run = 0;
  bool freed = false;
};

namespace {

constexpr std::size_t kPage = 4096;

thread_local int thread_device = 0;
thread_local Simulation* thread_simulation = nullptr;  // called last by this thread

bool only_looks() {
  thread_local const bool looks = [] {
    char name[16] = {};
    pthread_getname_np(pthread_self(), name, sizeof name);
    return std::string_view(name).starts_with("zc-cuda");
  }();
  return looks;
}

}  // namespace

class Simulation::Opened {
 public:
  explicit Opened(Simulation& simulation) : simulation_(simulation) {
    if (simulation_.opened_++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  ~Opened() {
    if (--simulation_.opened_ == 0) protect(PROT_NONE);
  }

 private:
  void protect(int access) {
    if (!simulation_.options_.guard_memory) return;
    for (const auto& [begin, allocation] : simulation_.allocations_) {
      if (allocation.live && allocation.device >= 0) mprotect(allocation.map, allocation.map_bytes, access);
    }
  }
  Simulation& simulation_;
};

Simulation::Simulation(const Options& options) : options_(options), random_(options.seed) {
  constexpr unsigned kWandering[] = {0, 30, 70, 100};
  wandering_ = kWandering[options.seed % 4];
  for (int device = 0; device < options.num_devices; ++device) {
    streams_.push_back(std::make_unique<SimulatedStream>(SimulatedStream{.simulation = this, .device = device}));
    default_streams_.push_back(streams_.back().get());
  }
}

Simulation::~Simulation() {
  for (const auto& [begin, allocation] : allocations_) munmap(allocation.map, allocation.map_bytes);
}

int Simulation::current_device() {
  thread_simulation = this;
  return thread_device;
}

void Simulation::set_device(int device) {
  ZC_CHECK(device >= 0 && device < options_.num_devices, kDevice, "[simulation] no device ", device);
  thread_device = device;
  thread_simulation = this;
}

// --- Memory

void* Simulation::allocate(std::int64_t bytes, int device) {
  const std::lock_guard lock(mutex_);
  if (device >= 0) {
    std::int64_t held = 0;
    for (const auto& [begin, allocation] : allocations_) {
      if (allocation.live && allocation.device == device) held += allocation.bytes;
    }
    if (held + bytes > options_.memory_bytes) return nullptr;
  }
  Allocation allocation{.bytes = bytes, .device = device};
  const auto room = (static_cast<std::size_t>(bytes) + 255) / 256 * 256;
  allocation.map_bytes = (room + kPage - 1) / kPage * kPage;
  allocation.map =
      mmap(nullptr, allocation.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ZC_CHECK(allocation.map != MAP_FAILED, kDevice, "[simulation] no memory left on this host");
  std::byte* begin = static_cast<std::byte*>(allocation.map) + allocation.map_bytes - room;  // ends with its pages
  std::memset(allocation.map, 0xfb, allocation.map_bytes);  // what nobody has written to is no number
  if (options_.guard_memory && device >= 0 && opened_ == 0) mprotect(allocation.map, allocation.map_bytes, PROT_NONE);
  allocations_[begin] = allocation;
  return begin;
}

void Simulation::free_memory(void* memory) noexcept {
  const std::lock_guard lock(mutex_);
  const auto at = allocations_.find(memory);
  if (at == allocations_.end() || !at->second.live) {
    problems_.push_back("memory freed that is not allocated");
    return;
  }
  at->second.live = false;
  madvise(at->second.map, at->second.map_bytes, MADV_DONTNEED);
  mprotect(at->second.map, at->second.map_bytes, PROT_NONE);
}

void* Simulation::allocate(std::int64_t bytes) { return allocate(bytes, thread_device); }
void* Simulation::allocate_pinned(std::int64_t bytes) { return allocate(bytes, -1); }
void Simulation::free(void* memory) noexcept { free_memory(memory); }
void Simulation::free_pinned(void* memory) noexcept { free_memory(memory); }

Simulation::Allocation* Simulation::find(const void* memory) {
  auto at = allocations_.upper_bound(memory);
  if (at == allocations_.begin()) return nullptr;
  --at;
  const auto* begin = static_cast<const std::byte*>(at->first);
  const auto* end = static_cast<const std::byte*>(at->second.map) + at->second.map_bytes;
  return memory >= begin && memory < end ? &at->second : nullptr;
}

void Simulation::touches(const void* memory, std::int64_t bytes, const char* what) {  // under the lock
  if (bytes == 0) return;
  const Allocation* allocation = find(memory);
  if (allocation == nullptr) return;  // host memory of somebody else
  if (!allocation->live) problems_.push_back(concat(what, ": touches memory that has been freed"));
  const auto* end = static_cast<const std::byte*>(allocation->map) + allocation->map_bytes;
  if (static_cast<const std::byte*>(memory) + bytes > end) problems_.push_back(concat(what, ": leaves its memory"));
}

std::int64_t Simulation::live_bytes(int device) const {
  const std::lock_guard lock(mutex_);
  std::int64_t total = 0;
  for (const auto& [begin, allocation] : allocations_) {
    if (allocation.live && allocation.device == device) total += allocation.bytes;
  }
  return total;
}

void Simulation::copy(void* to, const void* from, std::int64_t bytes, void* stream) {
  enqueue(
      stream,
      [this, to, from, bytes] {
        const std::size_t before = problems_.size();
        touches(to, bytes, "copy to");
        touches(from, bytes, "copy from");
        if (problems_.size() == before) std::memmove(to, from, static_cast<std::size_t>(bytes));
      },
      "copy");
}

void Simulation::zero(void* memory, std::int64_t bytes, void* stream) {
  enqueue(
      stream,
      [this, memory, bytes] {
        const std::size_t before = problems_.size();
        touches(memory, bytes, "zero");
        if (problems_.size() == before) std::memset(memory, 0, static_cast<std::size_t>(bytes));
      },
      "zero");
}

// --- Streams

SimulatedStream& Simulation::stream_of(void* handle) {
  if (handle == nullptr) return *default_streams_[static_cast<std::size_t>(thread_device)];
  auto& stream = *static_cast<SimulatedStream*>(handle);
  if (stream.freed) problems_.push_back("a stream is used after it was freed");
  return stream;
}

void* Simulation::make_stream() {
  const std::lock_guard lock(mutex_);
  streams_.push_back(std::make_unique<SimulatedStream>(SimulatedStream{.simulation = this, .device = thread_device}));
  return streams_.back().get();
}

void Simulation::free_stream(void* stream) noexcept {  // what is on it still runs
  const std::lock_guard lock(mutex_);
  static_cast<SimulatedStream*>(stream)->freed = true;
}

void Simulation::push(void* handle, SimulatedItem item) {
  SimulatedStream& stream = stream_of(handle);
  stream.queue.push_back(std::move(item));
  ++stream.num_pushed;
  if (options_.mode == Mode::kEager) run_all();
}

void Simulation::enqueue(void* stream, std::function<void()> work, const char* name) {
  const std::lock_guard lock(mutex_);
  note_call(concat(name, " on ", number(&stream_of(stream), "stream")));
  push(stream, {.name = name, .run = std::move(work)});
}

void Simulation::enqueue(void* stream, std::shared_ptr<Rendezvous> rendezvous, int member, std::function<void()> run,
                         std::shared_ptr<void> kept, const char* name) {
  const std::lock_guard lock(mutex_);
  note_call(concat(name, " on ", number(&stream_of(stream), "stream")));
  rendezvous->streams[static_cast<std::size_t>(member)] = &stream_of(stream);
  if (run) rendezvous->run = std::move(run);
  push(stream, {.name = name, .rendezvous = std::move(rendezvous), .member = member, .kept = std::move(kept)});
}

void Simulation::give_up(Rendezvous& rendezvous, int member) {
  const std::lock_guard lock(mutex_);
  rendezvous.gone[static_cast<std::size_t>(member)] = 1;
  if (options_.mode == Mode::kEager) run_all();
}

bool Simulation::runnable(const SimulatedStream& stream) const {
  if (stream.queue.empty()) return false;
  const SimulatedItem& head = stream.queue.front();
  if (head.waits_for) return head.waits_for->done;
  if (!head.rendezvous) return true;
  const Rendezvous& rendezvous = *head.rendezvous;
  if (rendezvous.gone[static_cast<std::size_t>(head.member)]) return true;
  return !hangs_ && rendezvous.run != nullptr &&
         std::ranges::none_of(rendezvous.gone, [](auto gone) { return gone != 0; }) &&
         std::ranges::all_of(rendezvous.streams, [&](const SimulatedStream* member) {
           return member != nullptr && !member->queue.empty() && member->queue.front().rendezvous == head.rendezvous;
         });
}

void Simulation::run_head(SimulatedStream& stream) {
  const Opened opened(*this);
  const auto pop = [](SimulatedStream& from) {
    SimulatedItem item = std::move(from.queue.front());
    from.queue.pop_front();
    ++from.num_run;
    return item;
  };
  const SimulatedItem& head = stream.queue.front();
  if (!head.rendezvous || head.rendezvous->gone[static_cast<std::size_t>(head.member)]) {
    const SimulatedItem item = pop(stream);
    if (item.run) item.run();
    return;
  }
  const std::shared_ptr<Rendezvous> rendezvous = head.rendezvous;
  rendezvous->run();
  for (SimulatedStream* member : rendezvous->streams) pop(*member);
}

// Lets one thing happen: what `target` needs first, or anything. False: nothing can.
bool Simulation::advance(SimulatedStream* target) {
  if (random_() % 100 >= wandering_) {
    for (std::size_t hops = 0; target != nullptr && hops < streams_.size() && !target->queue.empty(); ++hops) {
      if (runnable(*target)) {
        run_head(*target);
        return true;
      }
      const SimulatedItem& head = target->queue.front();
      SimulatedStream* next = head.waits_for ? head.waits_for->stream : nullptr;
      if (head.rendezvous) {
        for (SimulatedStream* member : head.rendezvous->streams) {
          const bool behind =
              member != nullptr && !member->queue.empty() && member->queue.front().rendezvous != head.rendezvous;
          if (behind) next = member;
        }
      }
      target = next;
    }
  }
  std::vector<SimulatedStream*> choice;
  for (const auto& stream : streams_) {
    if (runnable(*stream)) choice.push_back(stream.get());
  }
  if (choice.empty()) return false;
  run_head(*choice[random_() % choice.size()]);
  return true;
}

void Simulation::run_all() {
  for (bool any = true; any;) {
    any = false;
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      while (runnable(*streams_[i])) run_head(*streams_[i]), any = true;
    }
  }
}

void Simulation::synchronize(void* handle) {
  constexpr std::chrono::seconds kPatience{20};
  const auto begin = std::chrono::steady_clock::now();
  std::unique_lock lock(mutex_);
  SimulatedStream& stream = stream_of(handle);
  ++waits_[std::this_thread::get_id()].synchronizations;
  note_call(concat("synchronize ", number(&stream, "stream")));
  const std::int64_t wanted = stream.num_pushed;
  while (stream.num_run < wanted) {
    if (advance(&stream)) continue;
    ZC_CHECK(std::chrono::steady_clock::now() - begin < kPatience, kDevice, "[simulation] a stream hangs at ",
             stream.queue.front().name);
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    lock.lock();
  }
}

// --- Events

void* Simulation::make_event() {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::make_unique<SimulatedEvent>());
  return events_.back().get();
}

void Simulation::free_event(void* event) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase_if(events_, [event](const auto& each) { return each.get() == event; });
}

void Simulation::record(void* event, void* handle) {
  const std::lock_guard lock(mutex_);
  SimulatedStream& stream = stream_of(handle);
  note_call(concat("record ", number(event, "event"), " on ", number(&stream, "stream")));
  auto point = std::make_shared<Point>(&stream);
  static_cast<SimulatedEvent*>(event)->last = point;
  push(handle, {.name = "record", .run = [point] { point->done = true; }});
}

bool Simulation::done(void* event) {
  const std::lock_guard lock(mutex_);
  ZC_CHECK(!failed_, kDevice, "[simulation] the device has failed");
  const std::shared_ptr<Point> point = static_cast<SimulatedEvent*>(event)->last;
  if (!point || point->done) return true;
  ++waits_[std::this_thread::get_id()].questions;
  if (options_.mode == Mode::kAdversarial && !only_looks()) {
    for (auto steps = random_() % 8; steps > 0 && !point->done; --steps) advance(point->stream);
  }
  return point->done;
}

void Simulation::wait(void* stream, void* event) {
  const std::lock_guard lock(mutex_);
  note_call(concat("wait on ", number(&stream_of(stream), "stream"), " for ", number(event, "event")));
  const std::shared_ptr<Point> point = static_cast<SimulatedEvent*>(event)->last;
  if (point) push(stream, {.name = "wait", .waits_for = point});
}

void enqueue(void* stream, std::function<void()> work) {
  Simulation* const simulation =
      stream != nullptr ? static_cast<SimulatedStream*>(stream)->simulation : thread_simulation;
  simulation->launch(stream, std::move(work));
}

std::shared_ptr<Runtime> make_runtime() {
  return std::make_shared<Simulation>(Simulation::Options{.num_devices = 2, .mode = Simulation::Mode::kEager});
}

// --- What tests ask for

void Simulation::launch(void* stream, std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    ++num_launches_;
  }
  enqueue(stream, std::move(work));
}

int Simulation::num_launches() const {
  const std::lock_guard lock(mutex_);
  return num_launches_;
}

Simulation::Waits Simulation::waits() const {
  const std::lock_guard lock(mutex_);
  const auto at = waits_.find(std::this_thread::get_id());
  return at == waits_.end() ? Waits{} : at->second;
}

std::vector<std::string> Simulation::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

std::vector<std::string> Simulation::problems() const {
  const std::lock_guard lock(mutex_);
  return problems_;
}

void Simulation::hang(bool hangs) {
  const std::lock_guard lock(mutex_);
  hangs_ = hangs;
  if (options_.mode == Mode::kEager) run_all();
}

void Simulation::fail(bool failed) {
  const std::lock_guard lock(mutex_);
  failed_ = failed;
}

void Simulation::note_call(const std::string& text) {
  if (options_.record_calls) calls_.push_back(text);
}

std::string Simulation::number(const void* handle, const char* what) {
  if (!options_.record_calls) return {};
  auto& text = numbers_[handle];
  if (text.empty()) {
    const auto before =
        std::ranges::count_if(numbers_, [what](const auto& entry) { return entry.second.starts_with(what); });
    text = concat(what, " ", before);
  }
  return text;
}

}  // namespace zc::cuda
