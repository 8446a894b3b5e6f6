#include "zc/zero/grad_reducer.h"

#include <algorithm>
#include <chrono>

#include "zc/base/trace.h"

namespace zc::zero {
namespace {

constexpr std::size_t kBitsPerWord = 62;  // stays clear of the sign

void set_bit(std::vector<std::int64_t>& words, std::size_t bit) {
  words[bit / kBitsPerWord] |= std::int64_t{1} << (bit % kBitsPerWord);
}

bool test_bit(const std::vector<std::int64_t>& words, std::size_t bit) {
  return (words[bit / kBitsPerWord] >> (bit % kBitsPerWord)) & 1;
}

}  // namespace

GradReducer::GradReducer(std::shared_ptr<comm::Communicator> comm, device::Device& device, const ShardLayout& layout,
                         std::span<const Bucket> buckets, DType dtype, int num_buffers, std::shared_ptr<void> owner,
                         std::shared_ptr<comm::Communicator> gathers)
    : comm_(std::move(comm)),
      device_(device),
      layout_(layout),
      buckets_(buckets),
      dtype_(dtype),
      owner_(std::move(owner)),
      gathers_(std::move(gathers)) {
  const auto num_params = static_cast<std::size_t>(layout_.num_params());
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const BucketLayout& bucket = layout_.buckets()[b];
    labels_.push_back("reduce " + buckets_[b].label);
    if (!bucket.trainable) continue;
    order_.push_back(static_cast<int>(b));
    largest_bytes_ = std::max(largest_bytes_, bucket.numel * size_bytes(dtype_));
  }
  if (comm_->size() > 1) pool_.resize(std::min(order_.size(), static_cast<std::size_t>(num_buffers)));
  expected_.resize(num_params);
  arrivals_.resize(num_params);
  grads_.resize(num_params);
  late_.resize(num_params);
  missing_.resize(buckets_.size());
  launched_.resize(buckets_.size());
  folded_.resize(buckets_.size());
  last_arrival_.resize(buckets_.size());
  used_here_.resize(num_params);
  used_.resize(num_params);
  exchange_.resize(2 * ((num_params + kBitsPerWord - 1) / kBitsPerWord));
}

void GradReducer::begin_micro_step(bool has_micro_batch) {
  ZC_CHECK(!open_, kInternal, "[zero] micro-step begun inside a micro-step");
  open_ = true;
  has_micro_batch_ = has_micro_batch;
  next_in_order_ = 0;
  held_bytes_ = 0;
  clock_ = 0;
  std::fill(arrivals_.begin(), arrivals_.end(), 0);
  std::fill(grads_.begin(), grads_.end(), BufferView{});
  std::fill(late_.begin(), late_.end(), 0);
  std::fill(launched_.begin(), launched_.end(), 0);
  std::fill(last_arrival_.begin(), last_arrival_.end(), 0);
  std::fill(used_here_.begin(), used_here_.end(), 0);
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const auto& placements = layout_.buckets()[b].placements;
    missing_[b] = static_cast<int>(std::count_if(placements.begin(), placements.end(), [&](const Placement& p) {
      return recording_ || expected_[static_cast<std::size_t>(p.param)] > 0;
    }));
  }
}

std::span<const int> GradReducer::ready(int param, BufferView grad, bool may_launch) {
  ZC_CHECK(open_, kInternal, "[zero] a gradient arrived outside a micro-step");
  const auto p = static_cast<std::size_t>(param);
  const auto b = static_cast<std::size_t>(layout_.location(param).bucket);
  ++arrivals_[p];
  last_arrival_[b] = ++clock_;
  grads_[p] = grad;
  used_here_[p] = has_micro_batch_;
  just_launched_.clear();
  if (launched_[b]) {
    late_[p] = has_micro_batch_;
    return just_launched_;
  }
  if (arrivals_[p] == (recording_ ? 1 : expected_[p])) --missing_[b];
  if (recording_) {
    if (arrivals_[p] == 1) held_bytes_ += grad.bytes();
    if (held_bytes_ <= hold_bytes_) return just_launched_;
  }
  while (may_launch && next_in_order_ < order_.size() &&
         missing_[static_cast<std::size_t>(order_[next_in_order_])] == 0 && may_launch_next()) {
    launch(order_[next_in_order_++], false);
  }
  return just_launched_;
}

std::vector<int> GradReducer::end_micro_step() {
  ZC_CHECK(open_, kInternal, "[zero] no micro-step to end");
  const trace::Scope scope("end of micro-step");
  while (next_in_order_ < order_.size()) launch(order_[next_in_order_++], false);
  const std::vector<int> late = exchange_usage();
  std::vector<int> again;
  for (int param : late) again.push_back(layout_.location(param).bucket);
  std::sort(again.begin(), again.end());
  again.erase(std::unique(again.begin(), again.end()), again.end());
  for (int bucket : again) launch(bucket, true);
  if (recording_) agree_on_record();
  recording_ = !late.empty();
  open_ = false;
  return late;
}

// Whether a launch would not wait for peers, or may. Where it may not, this still waits a moment, since peers that use
// the same parameters are near; that keeps a fast rank from piling up gradients.
bool GradReducer::may_launch_next() {
  constexpr std::chrono::milliseconds kPatience{20};
  if (gathers_ == nullptr || pool_.empty()) return true;
  const comm::Work& work = pool_[next_buffer_].work;
  const trace::Scope scope("wait", pool_[next_buffer_].label);
  const bool free = work.may_wait(num_gathers(), was_patient_ ? std::chrono::milliseconds(0) : kPatience);
  was_patient_ = !free;
  return free;
}

std::int64_t GradReducer::num_gathers() const {
  return gathers_ != nullptr ? gathers_->counters()[static_cast<std::size_t>(comm::Op::kAllGather)].calls : 0;
}

// Puts the gradients of a bucket on their way. late_only: those that arrived after the bucket's first launch.
void GradReducer::launch(int bucket, bool late_only) {
  const auto b = static_cast<std::size_t>(bucket);
  const BucketLayout& layout = layout_.buckets()[b];
  const bool alone = pool_.empty();
  const bool first = folded_[b] == 0;
  parts_.clear();
  for (const Placement& placement : layout.placements) {
    BufferView& grad = grads_[static_cast<std::size_t>(placement.param)];
    const bool take = has_micro_batch_ && (!late_only || late_[static_cast<std::size_t>(placement.param)]);
    parts_.push_back({take ? grad.data : nullptr, grad.dtype, placement.offset, placement.numel});
    held_bytes_ -= grad.bytes();
    grad = {};
  }
  if (alone) {
    const trace::Scope scope("fold", buckets_[b].label);
    device_.kernels().fold_parts(parts_, dtype_, buckets_[b].grad_shard, first, stream_);
  } else {
    Buffer& buffer = pool_[next_buffer_];
    next_buffer_ = (next_buffer_ + 1) % pool_.size();
    trace::wait(buffer.work, buffer.label, stream_);
    if (!buffer.memory) buffer.memory = comm_->allocate(largest_bytes_);
    const BufferView staging{buffer.memory.get(), layout.numel, dtype_, device_.id()};
    {
      const trace::Scope scope("copy", buckets_[b].label);
      device_.kernels().pack(parts_, staging, stream_);
    }
    buffer.work = comm_->reduce_scatter_add(staging, buckets_[b].grad_shard, labels_[b], first, stream_, num_gathers());
    buffer.label = labels_[b];
    auto memory = std::make_shared<std::pair<Memory, std::shared_ptr<void>>>(buffer.memory, owner_);
    buffer.work.keep(trace::until_dropped("reduce", buckets_[b].label, std::move(memory)));
  }
  launched_[b] = 1;
  folded_[b] = 1;
  just_launched_.push_back(bucket);
}

void GradReducer::agree_on_record() {
  std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) {
    return last_arrival_[static_cast<std::size_t>(a)] < last_arrival_[static_cast<std::size_t>(b)];
  });
  std::vector<std::int64_t> order(order_.begin(), order_.end());
  if (comm_->rank() != 0) std::fill(order.begin(), order.end(), 0);
  comm_->all_reduce(order, comm::ReduceOp::kSum, "agree on the order of buckets").wait();
  std::copy(order.begin(), order.end(), order_.begin());
  expected_ = arrivals_;
  comm_->all_reduce(expected_, comm::ReduceOp::kMax, "agree on gradient arrivals").wait();
}

std::vector<int> GradReducer::exchange_usage() {
  const std::size_t half = exchange_.size() / 2;
  std::fill(exchange_.begin(), exchange_.end(), 0);
  for (std::size_t p = 0; p < used_here_.size(); ++p) {
    if (used_here_[p]) set_bit(exchange_, p);
    if (late_[p]) set_bit(exchange_, half * kBitsPerWord + p);
  }
  trace::wait(comm_->all_reduce(exchange_, comm::ReduceOp::kBitOr, "end of micro-step"), "used parameters");
  std::vector<int> late;
  for (std::size_t p = 0; p < used_.size(); ++p) {
    if (test_bit(exchange_, p)) used_[p] = 1;
    if (test_bit(exchange_, half * kBitsPerWord + p)) late.push_back(static_cast<int>(p));
  }
  return late;
}

void GradReducer::wait() {
  for (const Buffer& buffer : pool_) trace::wait(buffer.work, buffer.label, stream_);
}

std::int64_t GradReducer::most_pool_bytes() const { return static_cast<std::int64_t>(pool_.size()) * largest_bytes_; }

std::int64_t GradReducer::pool_bytes() const {
  const auto num_filled = std::ranges::count_if(pool_, [](const Buffer& buffer) { return buffer.memory != nullptr; });
  return num_filled * largest_bytes_;
}

void GradReducer::reset() {
  std::fill(used_.begin(), used_.end(), 0);
  std::fill(folded_.begin(), folded_.end(), 0);
}

void GradReducer::settle(int bucket) {
  const auto b = static_cast<std::size_t>(bucket);
  if (folded_[b] == 0) device_.kernels().zero(buckets_[b].grad_shard, stream_);
  folded_[b] = 1;
}

}  // namespace zc::zero
