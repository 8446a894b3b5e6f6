#include "zc/zero/param_gatherer.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "zc/base/error.h"
#include "zc/base/trace.h"

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
  Unit& entered = units_[index(unit)];
  const bool outermost = entered.calls++ == 0;  // in use from here on, so that nothing below releases it
  if (pass == Pass::kBackward) reach(unit);
  if (pass == Pass::kForward) {
    leave_backward();
    if (outermost && training) record({.unit = unit, .pass = pass});
  }
  gather(unit, pass != Pass::kDemand);
  if (pass == Pass::kForward && training) prefetch();
  return take_plan();
}

ParamGatherer::Plan ParamGatherer::leave(int unit, bool training) {
  Unit& left = units_[index(unit)];
  ZC_CHECK(left.calls > 0, kInternal, "[zero] unit ", left.spec.name, " left more often than entered");
  --left.calls;
  release_unless_kept(unit, training);
  return take_plan();
}

ParamGatherer::Plan ParamGatherer::need(int unit) {
  reach(unit);
  return take_plan();
}

ParamGatherer::Plan ParamGatherer::end_backward() {
  leave_backward();
  return take_plan();
}

void ParamGatherer::end_micro_step() {
  if (recorded_.empty()) return;
  predicted_.swap(recorded_);
  recorded_.clear();
  recorded_numel_ = 0;
  cursor_ = 0;
  for (Unit& unit : units_) unit.uses.clear();
  for (std::size_t at = 0; at < predicted_.size(); ++at) units_[index(predicted_[at].unit)].uses.push_back(at);
}

ParamGatherer::Plan ParamGatherer::invalidate() {
  for (const Unit& unit : units_) {
    ZC_CHECK(unit.calls == 0, kConfig, "[zero] unit \"", unit.spec.name,
             "\" is in use while its parameters are updated: got a step inside a forward, unsharded() or "
             "GatheredParameters(), expected one outside. Leave the block first.");
  }
  leave_backward();
  for (int unit = 0; unit < num_units(); ++unit) {
    if (units_[index(unit)].gathered) release(unit);
  }
  return take_plan();
}

void ParamGatherer::reach(int unit) {
  Unit& reached = units_[index(unit)];
  const bool first = !reached.needed;
  if (first) {
    record({.unit = unit, .pass = Pass::kBackward});
    reached.needed = true;
    drop_needed(unit);
    reached_ = unit;
  }
  gather(unit, true);
  if (first) prefetch();
}

void ParamGatherer::leave_backward() {
  drop_needed(-1);
  reached_ = -1;
}

// What the backward needed is no longer in use, except `unit` and those around it.
void ParamGatherer::drop_needed(int unit) {
  for (int other = reached_; other >= 0; other = units_[index(other)].spec.parent) {
    Unit& state = units_[index(other)];
    if (!state.needed || encloses(other, unit)) continue;
    state.needed = false;
    release_unless_kept(other, true);
  }
}

// --- What comes next

void ParamGatherer::record(Use use) {
  const Unit& used = units_[index(use.unit)];
  use.before = recorded_numel_;
  recorded_numel_ += used.numel;
  if (recorded_.size() < kMaxUses) recorded_.push_back(use);
  for (auto at = std::lower_bound(used.uses.begin(), used.uses.end(), cursor_); at != used.uses.end(); ++at) {
    if (predicted_[*at].pass != use.pass) continue;
    cursor_ = *at + 1;
    return;
  }
}

// Where in predicted_ the unit is used next; its end when it is not.
std::size_t ParamGatherer::next_use(int unit) const {
  const std::vector<std::size_t>& uses = units_[index(unit)].uses;
  const auto next = std::lower_bound(uses.begin(), uses.end(), cursor_);
  return next == uses.end() ? predicted_.size() : *next;
}

void ParamGatherer::prefetch() {
  std::int64_t ahead = 0;
  for (std::size_t at = cursor_; at < predicted_.size(); ++at) {
    const Unit& next = units_[index(predicted_[at].unit)];
    ahead += next.numel;
    if (ahead > limits_.prefetch_numel) return;
    if (next.gathered) continue;
    if (live_numel_ + next.numel > limits_.max_live_numel) return;
    gather(predicted_[at].unit, true);
  }
}

// --- Memory

void ParamGatherer::gather(int unit, bool bounded) {
  Unit& wanted = units_[index(unit)];
  if (wanted.gathered) return;
  while (bounded && live_numel_ + wanted.numel > limits_.max_live_numel) {
    const int victim = used_last();
    ZC_CHECK(victim >= 0, kConfig, "[zero] unit \"", wanted.spec.name, "\" needs ", wanted.numel,
             " elements beside the ", live_numel_, " in use: got a bound of max_live_numel = ", limits_.max_live_numel,
             " gathered elements (stage3_max_live_parameters), expected at least ", live_numel_ + wanted.numel,
             ". Raise it, or choose smaller units.");
    release(victim);
  }
  wanted.gathered = true;
  live_numel_ += wanted.numel;
  peak_live_numel_ = std::max(peak_live_numel_, live_numel_);
  // A unit that this very plan was to release has not been freed yet: it stays as it is.
  if (std::erase(plan_.release, unit) == 0) plan_.gather.push_back(unit);
}

// Of the gathered units that are not in use, the one whose next use is farthest; -1 when there is none.
int ParamGatherer::used_last() const {
  int last = -1;
  std::size_t farthest = 0;
  for (int unit = 0; unit < num_units(); ++unit) {
    const Unit& state = units_[index(unit)];
    if (!state.gathered || state.in_use() || state.numel == 0) continue;
    const std::size_t next = next_use(unit);
    if (last >= 0 && next <= farthest) continue;
    last = unit;
    farthest = next;
  }
  return last;
}

void ParamGatherer::release_unless_kept(int unit, bool training) {
  const Unit& state = units_[index(unit)];
  if (!state.gathered || state.in_use()) return;
  const bool fits = live_numel_ <= limits_.max_live_numel;  // not so where units are held on demand
  const bool all_near = 2 * total_numel_ < limits_.max_reuse_numel;
  const std::size_t next = next_use(unit);
  const bool near = training && next < predicted_.size() &&
                    predicted_[next].before - predicted_[cursor_].before < limits_.max_reuse_numel;
  if (!fits || !(all_near || near)) release(unit);
}

void ParamGatherer::release(int unit) {
  Unit& state = units_[index(unit)];
  const trace::Scope scope("release unit", state.spec.name);
  land(state);
  state.gathered = false;
  live_numel_ -= state.numel;
  plan_.release.push_back(unit);
}

void ParamGatherer::start(int bucket, BufferView full) {
  const Bucket& source = buckets_[static_cast<std::size_t>(bucket)];
  const BucketLayout& layout = layout_.buckets()[static_cast<std::size_t>(bucket)];
  Unit& unit = units_[index(layout.unit)];
  ZC_CHECK(full.numel == layout.numel && full.dtype == layout.compute_dtype, kInternal, "[zero] ", source.label,
           " gathered into ", full.numel, " elements of ", name(full.dtype));
  ZC_CHECK(unit.gathered, kInternal, "[zero] ", source.label, " gathered without a plan");
  const trace::Scope scope("start", labels_[static_cast<std::size_t>(bucket)]);
  if (!layout.sharded) {
    device_.kernels().cast(source.params, full, stream_);
    return;
  }
  // What travels is the narrower of the two dtypes; the result is the same. Only the host can widen in place.
  const bool widen = size_bytes(layout.dtype) < size_bytes(layout.compute_dtype) && !device_.runs_behind();
  BufferView travelling = full;
  if (widen) {
    const std::int64_t bytes = layout.numel * size_bytes(layout.dtype);
    travelling = {full.as<std::byte>() + full.bytes() - bytes, layout.numel, layout.dtype, full.device};
  }
  BufferView shard = source.params;
  if (shard.dtype != travelling.dtype) {
    shard = travelling.slice(source.shard_offset, layout.shard_numel);
    device_.kernels().cast(source.params, shard, stream_);
  }
  comm::Work work = comm_->all_gather(shard, travelling, labels_[static_cast<std::size_t>(bucket)], stream_);
  work.keep(trace::until_dropped("gather", source.label, owner_));
  unit.flights.push_back({bucket, full, std::move(work), widen});
}

void ParamGatherer::wait(int unit) {
  Unit& wanted = units_[index(unit)];
  const trace::Scope scope("wait for unit", wanted.spec.name);
  land(wanted);
}

void ParamGatherer::land(Unit& unit) {
  for (Flight& flight : unit.flights) {
    trace::wait(flight.work, labels_[static_cast<std::size_t>(flight.bucket)], stream_);
    if (flight.widen) {
      widen(device_.kernels(), flight.full, layout_.buckets()[static_cast<std::size_t>(flight.bucket)].dtype);
    }
  }
  unit.flights.clear();
}

std::int64_t ParamGatherer::most_live_bytes() const {
  std::int64_t all = 0;
  std::int64_t largest = 0;  // bytes an element
  for (const BucketLayout& bucket : layout_.buckets()) {
    if (bucket.unit < 0) continue;
    all += bucket.numel * size_bytes(bucket.compute_dtype);
    largest = std::max<std::int64_t>(largest, size_bytes(bucket.compute_dtype));
  }
  return std::min(all, limits_.max_live_numel * largest);
}

}  // namespace zc::zero
