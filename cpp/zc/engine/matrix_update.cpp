#include "zc/engine/matrix_update.h"

#include <algorithm>

#include "zc/base/trace.h"

namespace zc::engine {

device::OptimizerBuffers optimizer_buffers(const zero::Bucket& bucket) {
  device::OptimizerBuffers buffers{.grad = bucket.grads.data,
                                   .grad_dtype = bucket.grads.dtype,
                                   .param = bucket.master.as<float>(),
                                   .state1 = bucket.states[0].as<float>(),
                                   .state2 = bucket.states[1].as<float>(),
                                   .model_dtype = bucket.params.dtype};
  if (bucket.params.dtype != DType::kF32) {
    buffers.model = bucket.params.slice(bucket.owned_offset - bucket.kept_offset, bucket.master.numel).data;
  }
  return buffers;
}

MatrixUpdate::MatrixUpdate(comm::Communicator& comm, device::Device& device, const zero::ShardLayout& layout,
                           const std::vector<zero::Bucket>& buckets, const std::vector<zero::ParamSpec>& params,
                           bool sharded, const std::function<BufferView(std::int64_t, bool)>& allocate)
    : comm_(comm), device_(device), layout_(layout), buckets_(buckets), gathers_(sharded && comm.size() > 1) {
  for (const zero::ParamSpec& param : params) labels_.push_back("orthogonalized " + param.name);
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    const zero::BucketLayout& bucket = layout.buckets()[b];
    if (!bucket.matrices) continue;
    if (rounds_.empty() || std::ssize(rounds_.back().matrices) >= comm.size()) rounds_.emplace_back();
    Round& round = rounds_.back();
    round.parts.push_back({b, round.numel});
    for (const zero::Placement& placement : bucket.placements) {
      const std::int64_t rows = params[static_cast<std::size_t>(placement.param)].rows;
      round.matrices.push_back({placement.param, round.numel + placement.offset, rows, placement.numel / rows, 0});
    }
    round.numel += bucket.numel;
  }
  std::int64_t largest = 0, workspace = 0;
  for (Round& round : rounds_) {
    assign(round);
    largest = std::max(largest, round.numel);
    for (const Matrix& matrix : round.matrices) {  // also where it is another rank's: each holds as much as any
      workspace = std::max(workspace, device::orthogonalize_workspace(matrix.rows, matrix.columns));
    }
  }
  directions_ = allocate(largest, true);
  workspace_ = allocate(workspace, false);
}

// The most expensive matrix that is left goes to the rank that has least to do.
void MatrixUpdate::assign(Round& round) const {
  const auto cost = [](const Matrix& matrix) {
    const double least = static_cast<double>(std::min(matrix.rows, matrix.columns));
    return least * least * static_cast<double>(std::max(matrix.rows, matrix.columns));
  };
  std::vector<Matrix*> order;
  for (Matrix& matrix : round.matrices) order.push_back(&matrix);
  std::ranges::stable_sort(order, [&](const Matrix* a, const Matrix* b) { return cost(*a) > cost(*b); });
  std::vector<double> load(static_cast<std::size_t>(comm_.size()), 0);
  for (Matrix* matrix : order) {
    const auto least = std::ranges::min_element(load);
    matrix->owner = static_cast<int>(least - load.begin());
    *least += cost(*matrix);
  }
}

void MatrixUpdate::run(optim::Optimizer& optimizer, const math::StepScalars* step, device::Stream stream,
                       const std::function<void(std::size_t)>& updated) {
  const auto wait_all = [&] {
    for (comm::Work& work : works_) trace::wait(work, "matrices", stream);
    works_.clear();
  };
  for (const Round& round : rounds_) {
    const auto buffers_of = [&](const Part& part) {
      device::OptimizerBuffers buffers = optimizer_buffers(buckets_[part.bucket]);
      buffers.direction = directions_.as<float>() + part.offset + buckets_[part.bucket].owned_offset;
      return buffers;
    };
    for (const Part& part : round.parts) {
      const zero::Bucket& bucket = buckets_[part.bucket];
      const trace::Scope scope("momentum", bucket.label);
      optimizer.muon_momentum(bucket.pieces, step, buffers_of(part), stream);
      if (!gathers_) continue;
      const BufferView whole = directions_.slice(part.offset, layout_.buckets()[part.bucket].numel);
      works_.push_back(comm_.all_gather(whole, bucket.label, stream));
    }
    wait_all();
    for (const Matrix& matrix : round.matrices) {
      if (matrix.owner != comm_.rank() || !optimizer.used(matrix.param)) continue;
      const trace::Scope scope("orthogonalize", labels_[static_cast<std::size_t>(matrix.param)]);
      device_.kernels().orthogonalize(directions_.as<float>() + matrix.offset, matrix.rows, matrix.columns,
                                      optimizer.newton_schulz_iterations(matrix.param), workspace_.as<float>(), stream);
    }
    for (const Matrix& matrix : round.matrices) {
      if (comm_.size() == 1 || !optimizer.used(matrix.param)) continue;
      works_.push_back(comm_.broadcast(directions_.slice(matrix.offset, matrix.rows * matrix.columns), matrix.owner,
                                       labels_[static_cast<std::size_t>(matrix.param)], stream));
    }
    wait_all();
    for (const Part& part : round.parts) {
      const zero::Bucket& bucket = buckets_[part.bucket];
      const trace::Scope scope("update", bucket.label);
      optimizer.update(bucket.pieces, step, buffers_of(part), stream);
      updated(part.bucket);
    }
  }
}

}  // namespace zc::engine
