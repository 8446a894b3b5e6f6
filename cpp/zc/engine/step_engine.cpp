#include "zc/engine/step_engine.h"

#include <algorithm>
#include <array>
#include <bit>

#include "zc/base/trace.h"
#include "zc/math/exact_sum.h"

namespace zc::engine {
namespace {

std::vector<optim::Optimizer::Slot> optimizer_slots(const std::vector<zero::ParamSpec>& params) {
  std::vector<optim::Optimizer::Slot> out;
  for (const zero::ParamSpec& param : params)
    out.push_back({param.trainable ? param.group : -1, param.rows_by_columns});
  return out;
}

// A number made of the bits of everything that decides an update besides gradients and state (FNV-1a, 31 bits).
std::int64_t digest(std::span<const optim::Hyper> groups, double divisor, double max_norm, std::uint32_t settings) {
  std::uint64_t hash = 14695981039346656037ULL;
  const auto mix = [&](std::span<const double> values) {
    for (double value : values) hash = (hash ^ std::bit_cast<std::uint64_t>(value)) * 1099511628211ULL;
  };
  for (const optim::Hyper& hyper : groups) mix(optim::values(hyper));
  mix(std::array{divisor, max_norm, static_cast<double>(settings)});
  return static_cast<std::int64_t>((hash ^ (hash >> 32)) & 0x7fffffff);
}

}  // namespace

StepEngine::StepEngine(std::shared_ptr<comm::Communicator> comm, device::Device& device,
                       std::vector<zero::ParamSpec> params, std::vector<optim::Hyper> groups, const Options& options)
    : comm_(std::move(comm)),
      device_(device),
      options_(options),
      params_(std::move(params)),
      policy_(zero::StagePolicy::of(options.stage)),
      layout_(params_, comm_->size(), options.bucket_numel),
      optimizer_(device, std::move(groups), optimizer_slots(params_)) {
  ZC_CHECK(options.stage >= 0 && options.stage <= 3, kInternal, "[engine] ZeRO stage ", options.stage);
  ZC_CHECK(options.num_grad_buffers >= 1, kInternal, "[engine] a gradient pool of ", options.num_grad_buffers,
           " buffers");
  ZC_CHECK(!options.share_parameters || (policy_.shard_optimizer && options.stage < 3), kConfig,
           "[engine] zero.share_parameters: got stage ", options.stage,
           ", expected 1 or 2: below, each rank updates all parameters; above, none has them all. Leave it out.");
  gather_comm_ = options.units.empty() ? comm_ : comm_->split(0, comm_->rank());
  buckets_.resize(layout_.buckets().size());
  for (std::size_t b = 0; b < buckets_.size(); ++b) allocate_params(static_cast<int>(b));
  gatherer_ = std::make_unique<zero::ParamGatherer>(gather_comm_, device_, layout_, buckets_, options.units,
                                                    options.limits, memory_);
  gathers_.resize(buckets_.size());
  outcome_ = device::Download(device_, static_cast<std::int64_t>(kCountsAt + params_.size() * sizeof(std::int64_t)));
  if (options_.loss_scale) loss_scale_ = math::initial_loss_scale(*options_.loss_scale);
}

BufferView StepEngine::allocate(std::int64_t numel, DType dtype, const char* what, bool shared) {
  const std::int64_t bytes = numel * size_bytes(dtype);
  memory_->push_back(shared ? comm_->allocate(bytes) : device_.allocate(bytes));
  bytes_[what] += bytes;
  return {memory_->back().get(), numel, dtype, device_.id()};
}

void StepEngine::allocate_params(int index) {
  const zero::BucketLayout& layout = layout_.buckets()[static_cast<std::size_t>(index)];
  zero::Bucket& bucket = buckets_[static_cast<std::size_t>(index)];
  bucket.label = concat("bucket ", index, " (", params_[static_cast<std::size_t>(layout.placements.front().param)].name,
                        layout.placements.size() > 1 ? " and others)" : ")");
  gather_labels_.push_back("gather " + bucket.label);
  bucket.shard_offset = comm_->rank() * layout.shard_numel;
  bucket.kept_offset = layout.sharded ? bucket.shard_offset : 0;
  const char* what = layout.trainable ? "parameters" : "frozen_parameters";
  if (options_.share_parameters) {
    const std::int64_t bytes = layout.numel * size_bytes(layout.dtype);
    memory_->push_back(comm_->allocate_shared(bytes, "share " + bucket.label));
    bytes_[what] += bytes / comm_->size();
    bucket.params = {memory_->back().get(), layout.numel, layout.dtype, device_.id()};
  } else {
    bucket.params = allocate(layout.sharded ? layout.shard_numel : layout.numel, layout.dtype, what, true);
  }
  param_memory_.push_back(memory_->back());
  if (!layout.trainable) return;
  bucket.owned_offset = policy_.shard_optimizer ? bucket.shard_offset : 0;
  const std::int64_t owned_numel = policy_.shard_optimizer ? layout.shard_numel : layout.numel;
  bucket.master = layout.dtype == DType::kF32
                      ? bucket.params.slice(bucket.owned_offset - bucket.kept_offset, owned_numel)
                      : allocate(owned_numel, DType::kF32, "master_weights", false);
  const auto pieces = [&](std::int64_t begin, std::int64_t numel) {
    return device::PieceTable(device_, layout_.pieces(index, begin, begin + numel));
  };
  bucket.pieces = pieces(bucket.owned_offset, owned_numel);
  bucket.shard_pieces = pieces(bucket.shard_offset, layout.shard_numel);
}

void StepEngine::allocate_states(int index) {
  const zero::BucketLayout& layout = layout_.buckets()[static_cast<std::size_t>(index)];
  zero::Bucket& bucket = buckets_[static_cast<std::size_t>(index)];
  if (!layout.trainable) return;
  const bool gathered = !policy_.shard_grads && comm_->size() > 1;
  bucket.grads = allocate(bucket.master.numel, options_.accumulate_dtype, "gradient_accumulator", gathered);
  bucket.grad_shard = bucket.grads.slice(bucket.shard_offset - bucket.owned_offset, layout.shard_numel);
  for (int s = 0; s < optimizer_.num_states(layout.matrices); ++s) {
    bucket.states[static_cast<std::size_t>(s)] = allocate(bucket.master.numel, DType::kF32, "optimizer_state", false);
  }
}

void StepEngine::allocate_states() {
  for (const char* name : {"master_weights", "optimizer_state"}) bytes_.emplace(name, 0);
  for (std::size_t b = 0; b < buckets_.size(); ++b) allocate_states(static_cast<int>(b));
  const bool gathers_in_backward =
      std::ranges::any_of(layout_.buckets(), [](const zero::BucketLayout& bucket) { return bucket.sharded; });
  if (std::ranges::any_of(layout_.buckets(), [](const zero::BucketLayout& bucket) { return bucket.matrices; })) {
    matrix_update_ = std::make_unique<MatrixUpdate>(
        *comm_, device_, layout_, buckets_, params_, policy_.shard_optimizer,
        [&](std::int64_t numel, bool shared) { return allocate(numel, DType::kF32, "matrix_update", shared); });
  }
  reducer_ = std::make_unique<zero::GradReducer>(comm_, device_, layout_, buckets_, options_.reduce_dtype,
                                                 options_.num_grad_buffers, memory_,
                                                 gathers_in_backward ? gather_comm_ : nullptr);
  reducer_->set_stream(stream_);
}

StepEngine::ParamMemory StepEngine::param_memory(int param) const {
  const zero::ShardLayout::Location at = layout_.location(param);
  const BufferView& view = buckets_[static_cast<std::size_t>(at.bucket)].params;
  return {param_memory_[static_cast<std::size_t>(at.bucket)], view.bytes(), at.offset * size_bytes(view.dtype)};
}

void StepEngine::load_param(int param, BufferView values) {
  const zero::ParamSpec& spec = params_[static_cast<std::size_t>(param)];
  ZC_CHECK(values.numel == spec.numel && values.dtype == (spec.trainable ? DType::kF32 : spec.dtype), kInternal,
           "[engine] parameter ", spec.name, " loaded from ", values.numel, " elements of ", name(values.dtype));
  comm_->broadcast(values, 0, "load parameter " + spec.name, stream_).wait(stream_);
  const auto [at, bucket] = place(param);
  copy_overlap(values, at.offset, bucket.params, bucket.kept_offset);
  if (spec.trainable && spec.dtype != DType::kF32) {
    copy_overlap(values, at.offset, bucket.master, bucket.owned_offset);
  }
  // Nobody's next write shall come before another's of this one.
  if (options_.share_parameters) comm_->barrier("load shared parameter").wait();
}

void StepEngine::reload_master(int param) {
  const auto [at, bucket] = place(param);
  if (bucket.params.dtype == DType::kF32) return;
  copy_overlap(bucket.params.slice(at.offset, params_[static_cast<std::size_t>(param)].numel), at.offset, bucket.master,
               bucket.owned_offset);
}

StepEngine::Place StepEngine::place(int param) const {
  const zero::ShardLayout::Location at = layout_.location(param);
  return {at, buckets_[static_cast<std::size_t>(at.bucket)]};
}

// Copies what two ranges of a bucket have in common, `in` from element in_offset of the bucket on, `out` from
// out_offset.
void StepEngine::copy_overlap(BufferView in, std::int64_t in_offset, BufferView out, std::int64_t out_offset) {
  const std::int64_t first = std::max(in_offset, out_offset);
  const std::int64_t last = std::min(in_offset + in.numel, out_offset + out.numel);
  if (first >= last) return;
  device_.kernels().cast(in.slice(first - in_offset, last - first), out.slice(first - out_offset, last - first),
                         stream_);
}

// --- One parameter's state

// The part of it that this rank holds, of the parameter's whole bucket.
BufferView StepEngine::state(int param, StateKind kind) const {
  const int wanted = kind == StateKind::kState1 ? 1 : kind == StateKind::kState2 ? 2 : 0;
  const zero::ParamSpec& spec = params_[static_cast<std::size_t>(param)];
  ZC_CHECK(spec.trainable, kConfig, "[engine] parameter ", spec.name,
           " is not trained: got a request for its master, optimizer state or gradient, expected one for a trained "
           "parameter. Read the parameter itself.");
  const int num_states = optimizer_.num_states(spec.rows > 0);
  ZC_CHECK(wanted <= num_states, kConfig, "[engine] parameter ", spec.name, " has ", num_states,
           " optimizer states: got a request for number ", wanted, ". Ask for what this optimizer keeps.");
  const zero::Bucket& bucket = buckets_[static_cast<std::size_t>(layout_.location(param).bucket)];
  switch (kind) {
    case StateKind::kMaster:
      return bucket.master;
    case StateKind::kState1:
      return bucket.states[0];
    case StateKind::kState2:
      return bucket.states[1];
    case StateKind::kGrad:
      return bucket.grads;
  }
  return {};
}

// The same, of gradients what they count as, once everything launched is in them.
BufferView StepEngine::settled_state(int param, StateKind kind) {
  const BufferView held = state(param, kind);
  reducer_->wait();
  if (kind == StateKind::kGrad) reducer_->settle(layout_.location(param).bucket);
  return held;
}

// The elements of a parameter whose state `rank` owns. Of gradients that is its shard in every stage.
StepEngine::Range StepEngine::range_of(int param, int rank, StateKind kind) const {
  const zero::ShardLayout::Location at = layout_.location(param);
  const zero::BucketLayout& layout = layout_.buckets()[static_cast<std::size_t>(at.bucket)];
  const std::int64_t numel = params_[static_cast<std::size_t>(param)].numel;
  if (!policy_.shard_optimizer && kind != StateKind::kGrad) return {0, numel};
  const std::int64_t begin = std::clamp<std::int64_t>(rank * layout.shard_numel - at.offset, 0, numel);
  const std::int64_t end = std::clamp<std::int64_t>((rank + 1) * layout.shard_numel - at.offset, 0, numel);
  return {begin, end};
}

void StepEngine::read_owned_state(int param, StateKind kind, BufferView out) {
  const BufferView held = settled_state(param, kind);
  const Range range = owned_range(param, kind);
  const auto [at, bucket] = place(param);
  copy_overlap(held, bucket.owned_offset, out, at.offset + range.begin);
}

void StepEngine::write_owned_state(int param, StateKind kind, BufferView values) {
  const BufferView held = settled_state(param, kind);
  const Range range = owned_range(param, kind);
  const auto [at, bucket] = place(param);
  if (kind == StateKind::kGrad) reducer_->mark_used(param);
  copy_overlap(values, at.offset + range.begin, held, bucket.owned_offset);
  if (kind != StateKind::kMaster) return;
  copy_overlap(values, at.offset + range.begin, bucket.params, bucket.kept_offset);
  const auto b = static_cast<std::size_t>(at.bucket);
  make_whole(b);
}

void StepEngine::make_whole(std::size_t b) {
  if (!gathers_after_update(b)) return;
  if (options_.share_parameters) {
    comm_->barrier(gather_labels_[b]).wait();
  } else {
    comm_->all_gather(buckets_[b].params, gather_labels_[b], stream_).wait(stream_);
  }
}

void StepEngine::read_state(int param, StateKind kind, BufferView out) {
  const zero::ParamSpec& spec = params_[static_cast<std::size_t>(param)];
  const auto [at, bucket] = place(param);
  const BufferView held = settled_state(param, kind);
  copy_overlap(held, bucket.owned_offset, out, at.offset);
  if (!policy_.shard_optimizer && kind != StateKind::kGrad) return;  // every rank has all of it
  const std::string label = "read state of " + spec.name;
  std::vector<comm::Work> parts;
  for (int rank = 0; rank < comm_->size(); ++rank) {
    const Range range = range_of(param, rank, kind);
    if (range.begin == range.end) continue;
    parts.push_back(comm_->broadcast(out.slice(range.begin, range.end - range.begin), rank, label, stream_));
  }
  for (comm::Work& part : parts) part.wait(stream_);
}

void StepEngine::write_state(int param, StateKind kind, BufferView values) {
  if (kind == StateKind::kMaster) return load_param(param, values);
  const zero::ParamSpec& spec = params_[static_cast<std::size_t>(param)];
  const auto [at, bucket] = place(param);
  const BufferView held = settled_state(param, kind);
  comm_->broadcast(values, 0, "write state of " + spec.name, stream_).wait(stream_);
  const bool shard_only = kind == StateKind::kGrad;  // another rank's part of it is not this rank's to hold
  if (kind == StateKind::kGrad) reducer_->mark_used(param);
  copy_overlap(values, at.offset, shard_only ? bucket.grad_shard : held,
               shard_only ? bucket.shard_offset : bucket.owned_offset);
}

// --- Checkpoints

StepEngine::Range StepEngine::loaded_range(int param) const {
  const zero::BucketLayout& layout = layout_.buckets()[static_cast<std::size_t>(layout_.location(param).bucket)];
  if (layout.trainable) return range_of(param, comm_->rank(), StateKind::kMaster);
  if (layout.sharded) return saved_range(param);
  return {0, params_[static_cast<std::size_t>(param)].numel};
}

BufferView StepEngine::state_memory(int param, StateKind kind, Range range) const {
  const BufferView held = state(param, kind);
  if (range.begin == range.end) return {nullptr, 0, held.dtype, held.device};  // it may lie anywhere
  const auto [at, bucket] = place(param);
  return held.slice(at.offset + range.begin - bucket.owned_offset, range.end - range.begin);
}

BufferView StepEngine::kept_memory(int param, Range range) const {
  const auto [at, bucket] = place(param);
  if (range.begin == range.end) return {nullptr, 0, bucket.params.dtype, bucket.params.device};
  return bucket.params.slice(at.offset + range.begin - bucket.kept_offset, range.end - range.begin);
}

void StepEngine::set_loaded(std::span<const std::int64_t> steps) {
  result();
  const auto used = reducer_->used();
  if (std::ranges::any_of(used, [](std::uint8_t flag) { return flag != 0; })) zero_grad();
  optimizer_.set_steps(steps);
  follow_masters();
}

void StepEngine::follow_masters() {
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const zero::Bucket& bucket = buckets_[b];
    if (!layout_.buckets()[b].trainable) continue;
    if (bucket.params.dtype != DType::kF32)
      copy_overlap(bucket.master, bucket.owned_offset, bucket.params, bucket.kept_offset);
    make_whole(b);
  }
}

// --- The step

void StepEngine::set_stream(device::Stream stream) {
  stream_ = stream;
  gatherer_->set_stream(stream);
  if (reducer_) reducer_->set_stream(stream);
}

void StepEngine::step(std::span<const optim::Hyper> groups, double divisor, double max_norm, std::uint32_t settings,
                      bool stop, const Weights& weights) {
  result();
  optimizer_.set_groups(groups);
  if (!begin_step(divisor, max_norm, digest(groups, divisor, max_norm, settings), stop, weights)) return;
  const bool gather_grads = !policy_.shard_grads && comm_->size() > 1;
  for (std::size_t b = 0; gather_grads && b < buckets_.size(); ++b) {
    if (!layout_.buckets()[b].trainable) continue;
    gathers_[b] = comm_->all_gather(buckets_[b].grads, gather_labels_[b], stream_);
    gathers_[b].keep(trace::until_dropped("gather", buckets_[b].label, memory_));
  }
  const auto start_gather = [&](std::size_t b) {  // once what this rank owns of the parameters is updated
    if (!gathers_after_update(b) || options_.share_parameters) return;
    gathers_[b] = comm_->all_gather(buckets_[b].params, gather_labels_[b], stream_);
    gathers_[b].keep(trace::until_dropped("gather", buckets_[b].label, memory_));
  };
  const math::StepScalars* scalars = &outcome()->scalars;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const zero::Bucket& bucket = buckets_[b];
    if (!layout_.buckets()[b].trainable) continue;
    if (gather_grads) trace::wait(gathers_[b], gather_labels_[b], stream_);
    if (layout_.buckets()[b].matrices) continue;
    const trace::Scope scope("update", bucket.label);
    optimizer_.update(bucket.pieces, scalars, optimizer_buffers(bucket), stream_);
    start_gather(b);
  }
  if (matrix_update_) matrix_update_->run(optimizer_, scalars, stream_, start_gather);
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (gathers_after_update(b)) trace::wait(gathers_[b], gather_labels_[b], stream_);
  }
  // All ranks were past their backward when they met for the norm; now they wait for what the others have written.
  if (options_.share_parameters) trace::wait(comm_->barrier("update shared parameters"), "update shared parameters");
  reducer_->reset();
}

void StepEngine::begin_foreign_step(double divisor, double max_norm, std::uint32_t settings, bool stop,
                                    const Weights& weights) {
  ZC_CHECK(options_.accumulate_dtype == DType::kF32, kInternal, "[engine] a foreign optimizer needs fp32 gradients");
  result();
  if (!begin_step(divisor, max_norm, digest({}, divisor, max_norm, settings), stop, weights)) return;
  const math::StepScalars scalars = result().scalars;
  if (scalars.skip) return zero_grad();
  const bool gather_grads = !policy_.shard_grads && comm_->size() > 1;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (!layout_.buckets()[b].trainable) continue;
    reducer_->settle(static_cast<int>(b));
    if (gather_grads) {
      trace::wait(comm_->all_gather(buckets_[b].grads, gather_labels_[b], stream_), gather_labels_[b], stream_);
    }
    device_.kernels().scale(buckets_[b].grads, scalars.factor, stream_);
  }
}

void StepEngine::end_foreign_step() {
  follow_masters();
  reducer_->reset();
}

bool StepEngine::begin_step(double divisor, double max_norm, std::int64_t settings, bool stop, const Weights& weights) {
  ZC_CHECK(!reducer_->in_micro_step(), kInternal, "[engine] step inside a micro-step");
  reducer_->wait();
  measure(divisor, max_norm, settings, stop, weights);
  if (!device_.runs_behind() && result().scalars.skip) {
    result_.nonfinite = nonfinite_params();
    zero_grad();
    return false;
  }
  optimizer_.begin_step(reducer_->used(), stream_);
  return true;
}

// The exact norm over all ranks, and with it every scalar of the step. What the host knows travels between hosts; with
// it, where the device does not run behind, what kernels have computed.
void StepEngine::measure(double divisor, double max_norm, std::int64_t settings, bool stop, const Weights& weights) {
  const bool behind = device_.runs_behind();
  const auto num_params = static_cast<std::int64_t>(params_.size());
  const auto bytes = static_cast<std::int64_t>(sizeof(math::ExactSum)) + num_params * size_bytes(DType::kI64);
  const BufferView sums{square_sum(), bytes / size_bytes(DType::kI64), DType::kI64, device_.id()};
  bring_loss_scale();
  device_.kernels().zero(sums, stream_);
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (!reducer_->folded(static_cast<int>(b))) continue;
    const zero::Bucket& bucket = buckets_[b];
    const trace::Scope scope("norm of", bucket.label);
    device_.kernels().square_sum(bucket.grad_shard, bucket.shard_pieces, square_sum(), nonfinite(), stream_);
  }
  constexpr std::size_t kLimbs = math::ExactSum::kNumLimbs;
  std::array<std::int64_t, kLimbs + 3 + kWeightWords> message{};
  const auto words = std::span(message).last<kWeightWords>();
  if (!behind) {
    square_sum()->normalize();
    std::ranges::copy(square_sum()->limbs(), message.begin());
    message[kLimbs] = std::count(nonfinite(), nonfinite() + num_params, 1);
  }
  message[kLimbs + 1] = settings;
  message[kLimbs + 2] = stop ? 1 : 0;
  write_weights(weights, words);
  trace::wait(comm_->all_reduce(message, comm::ReduceOp::kSum, "gradient norm"), "gradient norm");
  ZC_CHECK(message[kLimbs + 1] == settings * comm_->size(), kConfig,
           "[engine] ranks step with different settings: got other learning rates, hyperparameters, numbers of "
           "micro-batches or parameters written by hand on some rank, expected the same on all. Nothing was updated. "
           "Change param_groups and parameters on every rank alike.");
  math::StepRule rule{.divisor = total_weight(words).value_or(divisor),
                      .max_norm = max_norm,
                      .scaled = options_.loss_scale.has_value(),
                      .loss_scale = options_.loss_scale.value_or(math::LossScaleRule{})};
  if (behind) {
    sums_ = comm_->all_reduce(sums, comm::ReduceOp::kSum, "sum of squares", stream_);
    trace::wait(sums_, "sum of squares", stream_);
    device_.kernels().finish_norm(square_sum(), nonfinite(), num_params, rule, outcome(), stream_);
  } else {
    std::copy_n(message.begin(), kLimbs, square_sum()->limbs().begin());
    device_.kernels().finish_norm(square_sum(), &message[kLimbs], 1, rule, outcome(), stream_);
  }
  outcome_.fetch(stream_);
  result_ = {};
  result_.stop = message[kLimbs + 2] != 0;
  pending_ = true;
}

const StepResult& StepEngine::result() {
  if (!pending_) return result_;
  outcome_.wait();
  sums_.wait();  // it has ended; if by being aborted, the outcome is none
  const auto& outcome = *reinterpret_cast<const math::StepOutcome*>(outcome_.host());
  result_.scalars = outcome.scalars;
  result_.exhausted = outcome.exhausted != 0;
  if (options_.loss_scale) loss_scale_ = outcome.scale;
  pending_ = false;
  if (device_.runs_behind() && outcome.scalars.skip) {
    optimizer_.undo_step();
    const auto* counts = reinterpret_cast<const std::int64_t*>(outcome_.host() + kCountsAt);
    for (std::size_t p = 0; p < params_.size(); ++p) {
      if (counts[p] > 0) result_.nonfinite.push_back(static_cast<int>(p));
    }
  }
  return result_;
}

std::vector<int> StepEngine::nonfinite_params() {
  std::vector<std::int64_t> flags(nonfinite(), nonfinite() + params_.size());
  comm_->all_reduce(flags, comm::ReduceOp::kMax, "find non-finite gradients").wait();
  std::vector<int> out;
  for (std::size_t p = 0; p < flags.size(); ++p) {
    if (flags[p]) out.push_back(static_cast<int>(p));
  }
  return out;
}

const math::LossScaleState& StepEngine::loss_scale() {
  result();
  return loss_scale_;
}

void StepEngine::set_loss_scale(const math::LossScaleState& state) {
  result();
  loss_scale_ = state;
  send_loss_scale_ = true;
}

void StepEngine::bring_loss_scale() {
  if (!send_loss_scale_) return;
  send_loss_scale_ = false;
  math::StepOutcome value{.scale = loss_scale_, .scale_f32 = static_cast<float>(loss_scale_.scale)};
  constexpr std::int64_t kBytes = sizeof value;
  device_.copy({&value, kBytes, DType::kU8, {}}, {outcome(), kBytes, DType::kU8, device_.id()}, stream_);
  device_.synchronize(stream_);
}

BufferView StepEngine::loss_scale_memory() {
  bring_loss_scale();
  return {&outcome()->scale_f32, 1, DType::kF32, device_.id()};
}

void StepEngine::zero_grad() {
  reducer_->wait();
  reducer_->reset();
}

std::map<std::string, std::int64_t> StepEngine::memory_report() const {
  std::map<std::string, std::int64_t> report = bytes_;
  report["gradient_buckets"] = reducer_->pool_bytes();
  return report;
}

std::map<std::string, std::int64_t> StepEngine::most_while_running() const {
  return {{"gradient_buckets", reducer_->most_pool_bytes()}, {"gathered_parameters", gatherer_->most_live_bytes()}};
}

}  // namespace zc::engine
