#include "zc/zero/param_gatherer.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "zc/base/error.h"

namespace zc::zero {
namespace {

// Converts numel elements that lie in the end of `full` to full's dtype, in place. Their own dtype is narrower, so that
// an element is never overwritten before it was read.
void widen(device::Kernels& kernels, BufferView full, DType from) {
  constexpr std::int64_t kChunkNumel = 4096;
  alignas(64) std::array<std::byte, kChunkNumel * 2> chunk;
  ZC_CHECK(size_bytes(from) <= 2, kInternal, "[zero] widening from ", name(from));
  const std::byte* source = full.as<std::byte>() + full.bytes() - full.numel * size_bytes(from);
  for (std::int64_t first = 0; first < full.numel; first += kChunkNumel) {
    const std::int64_t count = std::min(kChunkNumel, full.numel - first);
    std::memcpy(chunk.data(), source + first * size_bytes(from), static_cast<std::size_t>(count * size_bytes(from)));
    kernels.cast({chunk.data(), count, from, full.device}, full.slice(first, count), {});
  }
}

}  // namespace

ParamGatherer::ParamGatherer(std::shared_ptr<comm::Communicator> comm, device::Device& device,
                             const ShardLayout& layout, std::span<const Bucket> buckets, std::vector<UnitSpec> units,
                             const GatherLimits& limits, std::shared_ptr<void> owner)
    : comm_(std::move(comm)),
      device_(device),
      layout_(layout),
      buckets_(buckets),
      limits_(limits),
      owner_(std::move(owner)) {
  for (UnitSpec& spec : units) {
    ZC_CHECK(spec.parent < static_cast<int>(units_.size()), kInternal, "[zero] unit ", spec.name,
             " comes before the one around it");
    units_.push_back({.spec = std::move(spec)});
  }
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const BucketLayout& bucket = layout_.buckets()[b];
    labels_.push_back("gather " + buckets_[b].label);
    if (bucket.unit < 0) continue;
    Unit& unit = units_[index(bucket.unit)];
    unit.buckets.push_back(static_cast<int>(b));
    unit.numel += bucket.numel;
    total_numel_ += bucket.numel;
  }
  for (const Unit& unit : units_) {
    std::int64_t needed = unit.numel;
    for (int around = unit.spec.parent; around >= 0; around = units_[index(around)].spec.parent) {
      needed += units_[index(around)].numel;
    }
    ZC_CHECK(needed <= limits_.max_live_numel, kConfig, "[zero] unit \"", unit.spec.name, "\" has ", unit.numel,
             " elements, with the units around it ", needed,
             ": got a bound of max_live_numel = ", limits_.max_live_numel,
             " gathered elements (stage3_max_live_parameters), expected at least ", needed,
             ". Raise it, or choose smaller units by zero.unit_classes or zero.unit_numel.");
  }
}

ParamGatherer::~ParamGatherer() {
  for (Unit& unit : units_) {
    for (Flight& flight : unit.flights) {
      try {
        flight.work.wait();
      } catch (...) {  // nothing is written to its memory any more, which is all that matters here
      }
    }
  }
}

std::size_t ParamGatherer::index(int unit) const {
  ZC_CHECK(unit >= 0 && unit < num_units(), kInternal, "[zero] no unit ", unit);
  return static_cast<std::size_t>(unit);
}

bool ParamGatherer::encloses(int outer, int unit) const {
  while (unit >= 0 && unit != outer) unit = units_[index(unit)].spec.parent;
  return unit == outer;
}

// --- Uses

ParamGatherer::Plan ParamGatherer::enter(int unit, Pass pass, bool training) {
  Plan plan;
  if (pass == Pass::kBackward) plan = need(unit);
  if (pass == Pass::kForward) plan = end_backward();
  Unit& entered = units_[index(unit)];
  if (pass == Pass::kForward && entered.calls == 0 && training) record({unit, pass});
  ++entered.calls;
  gather(unit, pass != Pass::kDemand, plan);
  if (pass == Pass::kForward) prefetch(training, plan);
  return plan;
}

ParamGatherer::Plan ParamGatherer::leave(int unit, bool training) {
  Plan plan;
  Unit& left = units_[index(unit)];
  ZC_CHECK(left.calls > 0, kInternal, "[zero] unit ", left.spec.name, " left more often than entered");
  --left.calls;
  release_unless_kept(unit, training, plan);
  return plan;
}

ParamGatherer::Plan ParamGatherer::need(int unit) {
  Plan plan;
  Unit& needed = units_[index(unit)];
  if (!needed.needed) {
    record({unit, Pass::kBackward});
    needed.needed = true;
    for (int other = 0; other < num_units(); ++other) {
      if (!units_[index(other)].needed || encloses(other, unit)) continue;
      units_[index(other)].needed = false;
      release_unless_kept(other, true, plan);
    }
  }
  gather(unit, true, plan);
  prefetch(true, plan);
  return plan;
}

ParamGatherer::Plan ParamGatherer::end_backward() {
  Plan plan;
  for (int unit = 0; unit < num_units(); ++unit) {
    if (!units_[index(unit)].needed) continue;
    units_[index(unit)].needed = false;
    release_unless_kept(unit, true, plan);
  }
  return plan;
}

void ParamGatherer::end_micro_step() {
  if (!recorded_.empty()) predicted_ = std::move(recorded_);
  recorded_.clear();
  cursor_ = 0;
}

ParamGatherer::Plan ParamGatherer::invalidate() {
  Plan plan = end_backward();
  for (int unit = 0; unit < num_units(); ++unit) {
    const Unit& state = units_[index(unit)];
    if (!state.gathered) continue;
    ZC_CHECK(!state.in_use(), kConfig, "[zero] unit \"", state.spec.name,
             "\" is in use while its parameters are updated: got a step inside a forward, unsharded() or "
             "GatheredParameters(), expected one outside. Leave the block first.");
    release(unit, plan);
  }
  return plan;
}

// --- What comes next

void ParamGatherer::record(Use use) {
  if (recorded_.size() < kMaxUses) recorded_.push_back(use);
  const auto from = predicted_.begin() + static_cast<std::ptrdiff_t>(cursor_);
  const auto found = std::find(from, predicted_.end(), use);
  if (found != predicted_.end()) cursor_ = static_cast<std::size_t>(found - predicted_.begin()) + 1;
}

// Elements of the units used before `unit` is used again.
std::int64_t ParamGatherer::distance_to_next_use(int unit) const {
  std::int64_t distance = 0;
  for (std::size_t at = cursor_; at < predicted_.size(); ++at) {
    if (predicted_[at].unit == unit) return distance;
    distance += units_[index(predicted_[at].unit)].numel;
  }
  return kNever;
}

void ParamGatherer::prefetch(bool training, Plan& plan) {
  if (!training) return;
  std::int64_t ahead = 0;
  for (std::size_t at = cursor_; at < predicted_.size(); ++at) {
    const Unit& next = units_[index(predicted_[at].unit)];
    ahead += next.numel;
    if (ahead > limits_.prefetch_numel) return;
    if (next.gathered) continue;
    if (live_numel_ + next.numel > limits_.max_live_numel) return;
    gather(predicted_[at].unit, true, plan);
  }
}

// --- Memory

void ParamGatherer::gather(int unit, bool bounded, Plan& plan) {
  Unit& wanted = units_[index(unit)];
  if (wanted.gathered) return;
  while (bounded && live_numel_ + wanted.numel > limits_.max_live_numel) {
    int victim = -1;
    std::int64_t farthest = -1;
    for (int other = 0; other < num_units(); ++other) {
      const Unit& state = units_[index(other)];
      if (!state.gathered || state.in_use() || state.numel == 0) continue;
      const std::int64_t distance = distance_to_next_use(other);
      if (distance > farthest) {
        victim = other;
        farthest = distance;
      }
    }
    ZC_CHECK(victim >= 0, kConfig, "[zero] unit \"", wanted.spec.name, "\" needs ", wanted.numel,
             " elements beside the ", live_numel_, " in use: got a bound of max_live_numel = ", limits_.max_live_numel,
             " gathered elements (stage3_max_live_parameters). Raise it, or choose smaller units.");
    release(victim, plan);
  }
  wanted.gathered = true;
  live_numel_ += wanted.numel;
  peak_live_numel_ = std::max(peak_live_numel_, live_numel_);
  plan.gather.push_back(unit);
}

void ParamGatherer::release_unless_kept(int unit, bool training, Plan& plan) {
  Unit& state = units_[index(unit)];
  if (!state.gathered || state.in_use()) return;
  if (2 * total_numel_ < limits_.max_reuse_numel) return;
  if (training && distance_to_next_use(unit) < limits_.max_reuse_numel) return;
  release(unit, plan);
}

void ParamGatherer::release(int unit, Plan& plan) {
  Unit& state = units_[index(unit)];
  land(state);
  state.gathered = false;
  live_numel_ -= state.numel;
  // A unit that this very plan was to gather needs no memory after all.
  if (std::erase(plan.gather, unit) == 0) plan.release.push_back(unit);
}

void ParamGatherer::start(int bucket, BufferView full) {
  const Bucket& source = buckets_[static_cast<std::size_t>(bucket)];
  const BucketLayout& layout = layout_.buckets()[static_cast<std::size_t>(bucket)];
  Unit& unit = units_[index(layout.unit)];
  ZC_CHECK(full.numel == layout.numel && full.dtype == layout.compute_dtype, kInternal, "[zero] ", source.label,
           " gathered into ", full.numel, " elements of ", name(full.dtype));
  Flight flight{.bucket = bucket, .full = full};
  if (!layout.sharded) {
    device_.kernels().cast(source.params, full, {});
    return;
  }
  // What travels is the narrower of the two dtypes; the result is the same.
  flight.widen = size_bytes(layout.dtype) < size_bytes(layout.compute_dtype);
  BufferView travelling = full;
  if (flight.widen) {
    const std::int64_t bytes = layout.numel * size_bytes(layout.dtype);
    travelling = {full.as<std::byte>() + full.bytes() - bytes, layout.numel, layout.dtype, full.device};
  }
  device_.kernels().cast(source.params, travelling.slice(source.shard_offset, layout.shard_numel), {});
  flight.work = comm_->all_gather(travelling, labels_[static_cast<std::size_t>(bucket)]);
  flight.work.keep(owner_);
  unit.flights.push_back(std::move(flight));
}

void ParamGatherer::wait(int unit) { land(units_[index(unit)]); }

void ParamGatherer::land(Unit& unit) {
  for (Flight& flight : unit.flights) {
    flight.work.wait();
    if (flight.widen) {
      widen(device_.kernels(), flight.full, layout_.buckets()[static_cast<std::size_t>(flight.bucket)].dtype);
    }
  }
  unit.flights.clear();
}

}  // namespace zc::zero
