// The model states of one engine and the optimizer step over them: reduce -> norm -> unscale and clip -> update ->
// gather, one loop over buckets for every ZeRO stage.
//
// Ownership: the engine allocates everything; parameter buffers are wrapped by the framework and must not be used after
// the engine is gone unless their Memory is kept. One thread at a time. Collective calls must be made by all ranks
// in the same order; they fail as the communicator fails.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "zc/comm/communicator.h"
#include "zc/device/device.h"
#include "zc/device/transfer.h"
#include "zc/engine/matrix_update.h"
#include "zc/engine/reductions.h"
#include "zc/optim/optimizer.h"
#include "zc/zero/bucket.h"
#include "zc/zero/grad_reducer.h"
#include "zc/zero/param_gatherer.h"
#include "zc/zero/shard_layout.h"

namespace zc::engine {

struct Options {
  int stage = 0;                         // ZeRO stage
  std::int64_t bucket_numel = 1 << 22;   // elements
  int num_grad_buffers = 2;              // bucket buffers in the gradient pool
  DType reduce_dtype = DType::kF32;      // in which gradients travel
  DType accumulate_dtype = DType::kF32;  // in which their sums are kept
  bool share_parameters = false;         // stages 1 and 2: parameters exist once, in memory of all ranks
  std::vector<zero::UnitSpec> units{};   // that parameters name
  zero::GatherLimits limits{};
  std::optional<math::LossScaleRule> loss_scale{};  // gradients are those of a loss that was multiplied by it
};

// One fp32 value a parameter element.
enum class StateKind : std::uint8_t { kMaster, kState1, kState2, kGrad };

struct StepResult {
  math::StepScalars scalars;
  bool exhausted = false;      // skipped, and the loss scale was at its minimum
  bool stop = false;           // some rank asked to stop after this step
  std::vector<int> nonfinite;  // when skipped: parameters whose gradient is not finite, on any rank
};

class StepEngine {
 public:
  // Allocates the parameters only: load them all, then call allocate_states(). Collective.
  StepEngine(std::shared_ptr<comm::Communicator> comm, device::Device& device, std::vector<zero::ParamSpec> params,
             std::vector<optim::Hyper> groups, const Options& options);

  // Allocates accumulators and optimizer state, so that what the parameters came from can be freed before.
  void allocate_states();

  // Where a parameter without a unit lies: `memory` (kept alive by whoever wraps it) and the byte offset in it.
  struct ParamMemory {
    Memory memory;
    std::int64_t memory_bytes = 0;
    std::int64_t offset_bytes = 0;
  };
  ParamMemory param_memory(int param) const;

  device::Device& device() const { return device_; }
  int num_buckets() const { return static_cast<int>(buckets_.size()); }
  const zero::ShardLayout& layout() const { return layout_; }

  // Sets a parameter from rank 0's values, which replace those of the other ranks: what is kept is rounded to its
  // dtype, the master keeps all bits. A trainable parameter's values must be fp32, another's of its own dtype.
  // Collective.
  void load_param(int param, BufferView values);

  // Takes the owned part of the master of a parameter that is kept whole from what is kept, after somebody wrote to
  // that. Local.
  void reload_master(int param);

  // Gathers one kind of state of a trainable parameter into `out`, fp32 elements in its own order; or sets it from rank
  // 0's values (of kMaster: as load_param does). What a step of this kind has not: kConfig. kGrad: what was folded
  // since the last step. Collective.
  void read_state(int param, StateKind kind, BufferView out);
  void write_state(int param, StateKind kind, BufferView values);

  // The part of a parameter whose state of one kind this rank owns, and that part's state. In stage 0 that is all of
  // it, which every rank must set alike; of kGrad it is a shard in every stage. Local; but in the other stages setting
  // kMaster of a parameter that is kept whole is collective, since every rank then gets the others' parts, and kGrad is
  // set by all ranks, which then count the parameter as used. What a step of this kind has not: kConfig.
  struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };
  Range owned_range(int param, StateKind kind) const { return range_of(param, comm_->rank(), kind); }
  void read_owned_state(int param, StateKind kind, BufferView out);
  void write_owned_state(int param, StateKind kind, BufferView values);

  // For checkpoints, which read and write the engine's memory themselves.
  //
  // saved_range: the elements of a parameter that this rank saves; over all ranks each element once, in every stage.
  // loaded_range: those whose state, or values where nothing is trained, this rank keeps and has to load.
  // state_memory, kept_memory: where elements of a range that this rank keeps lie, fp32, or in the parameter's dtype.
  // set_loaded: all masters have been written to, and steps is the number of updates of each parameter: the parameters
  // follow, what was gathered is stale, folded gradients are dropped. Collective.
  Range saved_range(int param) const { return range_of(param, comm_->rank(), StateKind::kGrad); }
  Range loaded_range(int param) const;
  BufferView state_memory(int param, StateKind kind, Range range) const;
  BufferView kept_memory(int param, Range range) const;
  void set_loaded(std::span<const std::int64_t> steps);

  zero::GradReducer& reducer() { return *reducer_; }
  zero::ParamGatherer& gatherer() { return *gatherer_; }

  // The group in which parameters are gathered before use: the same ranks, other collectives.
  const std::shared_ptr<comm::Communicator>& gather_comm() const { return gather_comm_; }

  // The caller's kernels run on this stream, and what the engine puts on its device comes after them.
  void set_stream(device::Stream stream);

  // The optimizer step over everything folded since the last one; resets accumulators and usage. groups: one a
  // parameter group. divisor: micro-batches; where these have weights, the sum of all ranks' weights takes its place.
  // max_norm 0: no clipping. Nothing is updated when a gradient is not finite. settings: a number that must be equal on
  // all ranks, made of what else decides the update; when it or an argument other than weights differs, kConfig on all
  // of them. stop: this rank asks all to stop after this step. Collective. On a device that runs behind nobody waits
  // for it: result() tells how it went, and is asked by the next step at the latest.
  void step(std::span<const optim::Hyper> groups, double divisor, double max_norm, std::uint32_t settings,
            bool stop = false, const Weights& weights = {});

  // How the last step went. Waits for its norm, not for its update. Local.
  const StepResult& result();
  bool asked_to_stop() const { return result_.stop; }  // some rank did, for after the last step; known at once

  // With Options::loss_scale: what a loss is to be multiplied by, and where that stands as fp32 in device memory, for
  // kernels that must not wait for result(). The state can be set between steps.
  const math::LossScaleState& loss_scale();
  void set_loss_scale(const math::LossScaleState& state);
  BufferView loss_scale_memory();

  // The same with an update that the caller makes, of groups of ForeignHyper. Unless the result says skip, the
  // accumulators then hold the gradients, unscaled and clipped: the caller writes to the masters it owns and calls
  // end_foreign_step(), which brings them to the parameters. Both collective. The first waits for the result.
  void begin_foreign_step(double divisor, double max_norm, std::uint32_t settings, bool stop, const Weights& weights);
  void end_foreign_step();

  // Drops what was folded since the last step.
  void zero_grad();

  // Bytes held, by name: parameters, frozen_parameters, gradient_accumulator, master_weights, optimizer_state,
  // matrix_update, gradient_buckets.
  std::map<std::string, std::int64_t> memory_report() const;

  // What comes to it at most while steps run: gradient_buckets, gathered_parameters.
  std::map<std::string, std::int64_t> most_while_running() const;

  // Updates made to each parameter. Waits as result() does.
  std::span<const std::int64_t> param_steps() {
    result();  // a step that was skipped does not count
    return optimizer_.steps();
  }

 private:
  struct Place {
    zero::ShardLayout::Location at;
    const zero::Bucket& bucket;
  };
  Place place(int param) const;
  void allocate_params(int index);
  void allocate_states(int index);
  BufferView state(int param, StateKind kind) const;
  BufferView settled_state(int param, StateKind kind);
  Range range_of(int param, int rank, StateKind kind) const;
  BufferView allocate(std::int64_t numel, DType dtype, const char* what, bool shared);
  void copy_overlap(BufferView in, std::int64_t in_offset, BufferView out, std::int64_t out_offset);
  void make_whole(std::size_t bucket);  // all owners have written their shard of the parameters
  bool gathers_after_update(std::size_t bucket) const {
    return policy_.shard_optimizer && comm_->size() > 1 && !layout_.buckets()[bucket].sharded;
  }
  void follow_masters();  // what is kept of the parameters takes the masters' values, on all ranks
  // What comes before any update: the norm. False: it is known that nothing is to be updated, and everything folded is
  // dropped. Else the optimizer's step has begun.
  bool begin_step(double divisor, double max_norm, std::int64_t settings, bool stop, const Weights& weights);
  void measure(double divisor, double max_norm, std::int64_t settings, bool stop, const Weights& weights);
  std::vector<int> nonfinite_params();
  void bring_loss_scale();

  // Parts of outcome_, in device memory.
  static constexpr std::size_t kSumAt = sizeof(math::StepOutcome);
  static constexpr std::size_t kCountsAt = kSumAt + sizeof(math::ExactSum);
  math::StepOutcome* outcome() const { return reinterpret_cast<math::StepOutcome*>(outcome_.there()); }
  math::ExactSum* square_sum() const { return reinterpret_cast<math::ExactSum*>(outcome_.there() + kSumAt); }
  std::int64_t* nonfinite() const { return reinterpret_cast<std::int64_t*>(outcome_.there() + kCountsAt); }

  std::shared_ptr<comm::Communicator> comm_;
  std::shared_ptr<comm::Communicator> gather_comm_;
  device::Device& device_;
  Options options_;
  std::vector<zero::ParamSpec> params_;
  zero::StagePolicy policy_;
  zero::ShardLayout layout_;
  optim::Optimizer optimizer_;
  std::vector<zero::Bucket> buckets_;
  std::vector<std::string> gather_labels_;
  std::vector<Memory> param_memory_;  // one a bucket
  std::shared_ptr<std::vector<Memory>> memory_ =
      std::make_shared<std::vector<Memory>>();  // all; held by what is in flight
  std::map<std::string, std::int64_t> bytes_;
  std::unique_ptr<zero::GradReducer> reducer_;
  std::unique_ptr<zero::ParamGatherer> gatherer_;
  std::unique_ptr<MatrixUpdate> matrix_update_;  // null: there are no matrices to orthogonalise
  std::vector<comm::Work> gathers_;              // one a bucket, reused

  device::Stream stream_;
  // What kernels make of a step: a StepOutcome; the square sum, and for each parameter on how many ranks its gradient
  // was not finite, both of which ranks add up as integers.
  device::Download outcome_;
  comm::Work sums_;  // the reduction of the last step's norm, where the device runs behind
  StepResult result_;
  bool pending_ = false;             // result_ is not that of the last step yet
  math::LossScaleState loss_scale_;  // as of result_
  bool send_loss_scale_ = true;      // the outcome's is older
};

}  // namespace zc::engine
