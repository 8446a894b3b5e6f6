// Says which units' parameters are whole in memory at which time, and gathers them.
//
// A unit is a set of parameters that are gathered together before a module runs and released after it. The framework
// owns the memory of gathered parameters, since only its own storage can be emptied and refilled in place; so every
// decision is returned as a Plan, which the caller carries out: free the memory of `release`, make memory for `gather`
// and start() its buckets, all in the order given, then wait() for the unit it needs.
//
// Note: all ranks must go through the same calls, as they do when they run the same modules; the decisions depend on
// nothing else, so gathers are launched in one order everywhere, and the guard names the ranks that took other paths.
//
// Note: what is kept. The order of uses in the last micro-step predicts those of this one. A unit that is no longer in
// use is kept when the elements used until its next use are fewer than max_reuse_numel, and given up, the one used
// last first, when another needs its room. Without a prediction (the first micro-step, evaluation) nothing is kept,
// unless max_reuse_numel exceeds what lies between any two uses. Nothing is kept above max_live_numel.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "zc/comm/communicator.h"
#include "zc/device/device.h"
#include "zc/zero/bucket.h"

namespace zc::zero {

struct UnitSpec {
  std::string name;
  int parent = -1;  // the unit of an enclosing module; -1: none
};

struct GatherLimits {
  std::int64_t max_live_numel = 1'000'000'000;   // gathered elements, padding included
  std::int64_t max_reuse_numel = 1'000'000'000;  // see above
  std::int64_t prefetch_numel = 50'000'000;      // elements gathered ahead of their use; 0: none
};

class ParamGatherer {
 public:
  // Forward; backward, recomputation in it included; or gathered on demand, by somebody who is not held to the bound.
  enum class Pass : std::uint8_t { kForward, kBackward, kDemand };

  struct Plan {
    std::vector<int> release;  // units
    std::vector<int> gather;
  };

  // buckets: of `layout`; must outlive the gatherer. owner: keeps the shards' memory alive. Throws kConfig when a unit
  // with those around it does not fit into max_live_numel.
  ParamGatherer(std::shared_ptr<comm::Communicator> comm, device::Device& device, const ShardLayout& layout,
                std::span<const Bucket> buckets, std::vector<UnitSpec> units, const GatherLimits& limits,
                std::shared_ptr<void> owner);
  ~ParamGatherer();  // waits for what is on its way
  ParamGatherer(const ParamGatherer&) = delete;
  ParamGatherer& operator=(const ParamGatherer&) = delete;

  // What the caller's kernels run on: memory that start() is given is free in its order, and wait() makes it wait.
  void set_stream(device::Stream stream) { stream_ = stream; }

  int num_units() const { return static_cast<int>(units_.size()); }
  std::span<const int> buckets(int unit) const { return units_[index(unit)].buckets; }

  // The unit's module begins (enter) and ends (leave) a call; calls nest. `training`: a backward will follow, so that
  // the order of uses is recorded and predicted. enter() throws kConfig when the units in use leave no room within
  // max_live_numel; the call has begun all the same, and its end must be told.
  Plan enter(int unit, Pass pass, bool training);
  Plan leave(int unit, bool training);

  // The unit's parameters are needed by the backward from now on, until it first needs another unit that does not lie
  // within this one. Throws as enter() does.
  Plan need(int unit);

  // No backward is running: what only it needed is no longer in use.
  Plan end_backward();

  // Puts one bucket of a unit of the plan on its way into `full`: the whole bucket in its compute dtype, which must
  // stay until wait(), or until the gatherer is gone.
  void start(int bucket, BufferView full);

  // Waits until the unit is whole; on a device that runs behind the stream waits. Nothing to do when it is.
  void wait(int unit);

  // A micro-step has ended: its order of uses predicts the next one's.
  void end_micro_step();

  // Parameters are about to change, and what was gathered will be stale. Waits for what is on its way. Throws kConfig
  // when a call is open; nothing is released then.
  Plan invalidate();

  // Gathered now, or on the way; and at most so far. In elements, padding included.
  std::int64_t live_numel() const { return live_numel_; }
  std::int64_t peak_live_numel() const { return peak_live_numel_; }

  // The most that may be gathered at a time.
  std::int64_t most_live_bytes() const;

 private:
  struct Flight {
    int bucket = 0;
    BufferView full;
    comm::Work work;
    bool widen = false;  // arrived in the model dtype, in the end of `full`
  };
  struct Unit {
    UnitSpec spec;
    std::vector<int> buckets{};
    std::int64_t numel = 0;
    int calls = 0;          // open
    bool needed = false;    // by the backward
    bool gathered = false;  // live, or to be started by the caller, or on its way
    std::vector<Flight> flights{};
    std::vector<std::size_t> uses{};  // where in predicted_, ascending
    bool in_use() const { return calls > 0 || needed; }
  };
  struct Use {
    int unit = 0;
    Pass pass = Pass::kForward;
    std::int64_t before = 0;  // elements of the uses before it in its micro-step
  };

  static constexpr std::size_t kMaxUses = 1 << 20;  // of one micro-step, after which no more are recorded

  std::size_t index(int unit) const;
  bool encloses(int outer, int unit) const;
  Plan take_plan() { return std::exchange(plan_, {}); }
  void reach(int unit);
  void leave_backward();
  void drop_needed(int unit);
  void record(Use use);
  std::size_t next_use(int unit) const;
  void prefetch();
  void gather(int unit, bool bounded);
  int used_last() const;
  void release_unless_kept(int unit, bool training);
  void release(int unit);
  void land(Unit& unit);

  std::shared_ptr<comm::Communicator> comm_;
  device::Device& device_;
  const ShardLayout& layout_;
  std::span<const Bucket> buckets_;
  GatherLimits limits_;
  std::shared_ptr<void> owner_;
  device::Stream stream_;
  std::vector<Unit> units_;
  std::vector<std::string> labels_;
  std::int64_t total_numel_ = 0;
  std::int64_t live_numel_ = 0;
  std::int64_t peak_live_numel_ = 0;

  Plan plan_;         // decided, not handed out yet; it outlasts a call that throws
  int reached_ = -1;  // the unit that the backward reached last: only it and those around it are needed

  std::vector<Use> predicted_;  // the uses of the last micro-step
  std::vector<Use> recorded_;   // of this one
  std::int64_t recorded_numel_ = 0;
  std::size_t cursor_ = 0;  // in predicted_: after the last use that matched
};

}  // namespace zc::zero
