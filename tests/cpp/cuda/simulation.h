// GPUs that are queues of closures over host memory, with the semantics of CUDA's streams and events: what a stream
// has been given runs some time later, in its order, and nothing else is ordered.
//
// Eager: everything runs as soon as it may. Adversarial: nothing runs before somebody synchronizes or asks for an
// event, and then as late as is legal for what is asked for, or in an order drawn at random, or something between, as
// the seed says. So a missing event shows as other bits.
//
// Memory that is freed becomes inaccessible and is not handed out again while the simulation lives. Copies, and
// kernels that say what they touch (touches()), are checked when they run, and what is wrong with them is kept in
// problems(). With Options::guard_memory the host cannot touch a device's memory at all.
//
// From any thread. Threads that only look after others' work ("zc-cuda") make nothing go on by asking.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "zc/cuda/runtime.h"

namespace zc::cuda {

class Simulation;

// Work on several streams at a time: runs when each of them has come to it.
struct Rendezvous {
  explicit Rendezvous(int size) : streams(static_cast<std::size_t>(size)), gone(streams.size()) {}
  std::vector<struct SimulatedStream*> streams;  // of each member; null: not called yet
  std::vector<std::uint8_t> gone;                // members that have given it up; it never runs then
  std::function<void()> run{};
};

class Simulation final : public Runtime {
 public:
  enum class Mode { kEager, kAdversarial };
  struct Options {
    int num_devices = 1;
    int num_multiprocessors = 2;
    Mode mode = Mode::kAdversarial;
    unsigned seed = 1;
    bool guard_memory = false;
    bool record_calls = false;
    std::int64_t memory_bytes = std::int64_t{4} << 30;  // of a device
    bool same_device = false;                           // all devices are one and the same
  };
  explicit Simulation(const Options& options);
  ~Simulation() override;

  int num_devices() override { return options_.num_devices; }
  std::string device_name(int device) override { return "simulated device " + std::to_string(device); }
  std::string device_id(int device) override {
    return "simulated " + std::to_string(options_.same_device ? 0 : device);
  }
  int num_multiprocessors(int) override { return options_.num_multiprocessors; }
  int current_device() override;
  void set_device(int device) override;
  void* allocate(std::int64_t bytes) override;
  void free(void* memory) noexcept override;
  void* allocate_pinned(std::int64_t bytes) override;
  void free_pinned(void* memory) noexcept override;
  void copy(void* to, const void* from, std::int64_t bytes, void* stream) override;
  void zero(void* memory, std::int64_t bytes, void* stream) override;
  void* make_stream() override;
  void free_stream(void* stream) noexcept override;
  void synchronize(void* stream) override;
  void* make_event() override;
  void free_event(void* event) noexcept override;
  void record(void* event, void* stream) override;
  bool done(void* event) override;
  void wait(void* stream, void* event) override;

  void enqueue(void* stream, std::function<void()> work, const char* name = "kernel");
  void launch(void* stream, std::function<void()> work);
  // run: what they do together, given by the last member; without it they wait for ever. kept: lives until then.
  void enqueue(void* stream, std::shared_ptr<Rendezvous> rendezvous, int member, std::function<void()> run,
               std::shared_ptr<void> kept, const char* name);
  void give_up(Rendezvous& rendezvous, int member);

  // By what runs on a stream: this memory is read or written now.
  void touches(const void* memory, std::int64_t bytes, const char* what);

  // What this thread has waited for: synchronize() calls, and questions for events that were not done.
  struct Waits {
    std::int64_t synchronizations = 0;
    std::int64_t questions = 0;
  };
  Waits waits() const;

  int num_launches() const;  // kernels, of the host build, put on a stream so far

  // With Options::record_calls: "record event 3 on stream 1", in the order of the calls.
  std::vector<std::string> calls() const;

  std::vector<std::string> problems() const;
  std::int64_t live_bytes(int device) const;  // allocated there now
  void hang(bool hangs);                      // what several streams do together does not run from now on
  void fail(bool failed);                     // questions for events end in kDevice from now on

 private:
  struct Allocation {
    void* map = nullptr;
    std::size_t map_bytes = 0;
    std::int64_t bytes = 0;
    int device = -1;  // -1: pinned host memory
    bool live = true;
  };
  class Opened;  // the devices' memory is accessible

  void* allocate(std::int64_t bytes, int device);
  void free_memory(void* memory) noexcept;
  Allocation* find(const void* memory);
  SimulatedStream& stream_of(void* handle);
  void push(void* stream, struct SimulatedItem item);
  bool runnable(const SimulatedStream& stream) const;
  bool advance(SimulatedStream* target);
  void run_head(SimulatedStream& stream);
  void run_all();
  void note_call(const std::string& text);
  std::string number(const void* handle, const char* what);

  Options options_;
  mutable std::mutex mutex_;
  std::mt19937 random_;
  unsigned wandering_;  // of 100 steps: how many are of a stream drawn at random
  std::vector<std::unique_ptr<SimulatedStream>> streams_;
  std::vector<std::unique_ptr<struct SimulatedEvent>> events_;
  std::vector<SimulatedStream*> default_streams_;
  std::map<const void*, Allocation> allocations_;  // by begin
  std::map<std::thread::id, Waits> waits_;
  std::vector<std::string> calls_;
  std::vector<std::string> problems_;
  std::map<const void*, std::string> numbers_;
  int opened_ = 0;
  int num_launches_ = 0;
  bool hangs_ = false;
  bool failed_ = false;
};

// Kernels that are compiled for the host: puts one on a stream, of the simulation that this thread called last where it
// is the default one.
void enqueue(void* stream, std::function<void()> work);

}  // namespace zc::cuda
