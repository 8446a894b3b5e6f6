// Muon's update of matrices, which needs them whole: each is orthogonalised by one rank, its owner.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "zc/comm/communicator.h"
#include "zc/device/device.h"
#include "zc/optim/optimizer.h"
#include "zc/zero/bucket.h"
#include "zc/zero/shard_layout.h"

namespace zc::engine {

// Buckets of matrices are gone through in rounds of at least as many matrices as there are ranks. In each, a rank
// updates the momentum of what it owns of the buckets, which leaves its part of the directions in a buffer of the whole
// round; parts are gathered, owners orthogonalise their matrices in place, and send them to all ranks, which then
// update what they own of the parameters. So momentum lies in shards, like any optimizer state, and the bits are those
// of one rank: neither who computes a matrix nor how it is cut enters.
class MatrixUpdate {
 public:
  // buckets: of `layout`, with their states; must outlive this, as must what else is referred to. sharded: ranks own
  // shards; else all own everything. allocate: memory of so many fp32 elements; true: that peers may read.
  MatrixUpdate(comm::Communicator& comm, device::Device& device, const zero::ShardLayout& layout,
               const std::vector<zero::Bucket>& buckets, const std::vector<zero::ParamSpec>& params, bool sharded,
               const std::function<BufferView(std::int64_t, bool)>& allocate);

  // Updates all used matrices; updated(b): what this rank owns of bucket b is done, in the order of the stream.
  // Collective; a step has begun. step: in device memory.
  void run(optim::Optimizer& optimizer, const math::StepScalars* step, device::Stream stream,
           const std::function<void(std::size_t)>& updated);

 private:
  struct Matrix {
    int param = 0;
    std::int64_t offset = 0;  // in the round's buffer
    std::int64_t rows = 0, columns = 0;
    int owner = 0;
  };
  struct Part {
    std::size_t bucket = 0;
    std::int64_t offset = 0;  // in the round's buffer
  };
  struct Round {
    std::vector<Part> parts;
    std::vector<Matrix> matrices;
    std::int64_t numel = 0;
  };
  void assign(Round& round) const;

  comm::Communicator& comm_;
  device::Device& device_;
  const zero::ShardLayout& layout_;
  const std::vector<zero::Bucket>& buckets_;
  bool gathers_;
  std::vector<Round> rounds_;
  std::vector<std::string> labels_;  // one a parameter
  BufferView directions_;            // of a round
  BufferView workspace_;
  std::vector<comm::Work> works_;
};

// What the kernels need of a bucket.
device::OptimizerBuffers optimizer_buffers(const zero::Bucket& bucket);

}  // namespace zc::engine
