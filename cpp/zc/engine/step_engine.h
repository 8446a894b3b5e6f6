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
#include <span>
#include <string>
#include <vector>

#include "zc/comm/communicator.h"
#include "zc/device/device.h"
#include "zc/optim/optimizer.h"
#include "zc/zero/bucket.h"
#include "zc/zero/grad_reducer.h"
#include "zc/zero/shard_layout.h"

namespace zc::engine {

struct Options {
  int stage = 0;                        // ZeRO stage, 0 to 2
  std::int64_t bucket_numel = 1 << 23;  // elements
  int num_grad_buffers = 2;             // bucket buffers in the gradient pool
};

struct StepResult {
  math::StepScalars scalars;
  std::vector<int> nonfinite;  // when skipped: parameters whose gradient is not finite, on any rank
};

class StepEngine {
 public:
  StepEngine(std::shared_ptr<comm::Communicator> comm, device::Device& device, std::vector<zero::ParamSpec> params,
             std::vector<optim::Hyper> groups, const Options& options);

  // Where a parameter of the model lies: `memory` (kept alive by whoever wraps it) and the byte offset in it.
  struct ParamMemory {
    Memory memory;
    std::int64_t memory_bytes = 0;
    std::int64_t offset_bytes = 0;
  };
  ParamMemory param_memory(int param) const;

  int num_buckets() const { return static_cast<int>(buckets_.size()); }
  int bucket_of(int param) const { return layout_.location(param).bucket; }

  // Sets a parameter from rank 0's fp32 values, which replace those of the other ranks: the model's copy is rounded to
  // its dtype, the master keeps all bits. Collective.
  void load_param(int param, BufferView values);

  // Takes the owned part of a parameter's master from the model's copy, after somebody wrote to that. Local.
  void reload_master(int param);

  zero::GradReducer& reducer() { return *reducer_; }

  // The optimizer step over everything folded since the last one; resets accumulators and usage. groups: one a
  // parameter group. divisor: loss scale times micro-batches; max_norm 0: no clipping. Nothing is updated when a
  // gradient is not finite. settings: a number that must be equal on all ranks, made of what else decides the update;
  // when it or an argument differs, kConfig on all of them. Collective.
  StepResult step(std::span<const optim::Hyper> groups, double divisor, double max_norm, std::uint32_t settings);

  // Drops what was folded since the last step.
  void zero_grad();

  // Bytes held, by name: parameters, gradient_accumulator, master_weights, optimizer_state, pool.
  std::map<std::string, std::int64_t> memory_report() const;

  // Updates made to each parameter.
  std::span<const std::int64_t> param_steps() const { return optimizer_.steps(); }

 private:
  void allocate_bucket(int index);
  BufferView allocate(std::int64_t numel, DType dtype, const char* what, bool shared);
  void set_master(int param, BufferView values);
  bool gathers_params() const { return policy_.shard_optimizer && comm_->size() > 1; }
  math::StepScalars measure(double divisor, double max_norm, std::int64_t settings);
  std::vector<int> nonfinite_params();

  std::shared_ptr<comm::Communicator> comm_;
  device::Device& device_;
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
  std::vector<comm::Work> gathers_;  // one a bucket, reused
  std::vector<std::uint8_t> nonfinite_;
};

}  // namespace zc::engine
