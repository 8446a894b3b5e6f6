// The partitioner: where each parameter lies in which bucket, and which part of a bucket is whose. Pure arithmetic.
//
// Note: why blocks. A norm block is up to 1024 consecutive elements of one parameter, counted from the parameter's
// start. A parameter of >= 1024 elements starts at a multiple of 1024 in its bucket, a smaller one at a multiple of 64
// and never straddles a multiple of 1024, and shards are cut at multiples of 1024 only. So every norm block lies
// whole in one shard, and no bucket cut, stage or number of ranks changes what a block holds.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "zc/base/dtype.h"
#include "zc/device/kernels.h"
#include "zc/math/norm.h"

namespace zc::zero {

using math::kBlockNumel;  // 1024
inline constexpr std::int64_t kSmallAlignment = 64;

struct ParamSpec {
  std::string name;
  std::int64_t numel = 0;
  DType dtype = DType::kF32;  // in which it is kept
  int group = 0;              // index of its optimizer parameter group
  int unit = -1;              // it is gathered with this unit before use; -1: it is used where it is kept, whole
  DType compute_dtype = DType::kF32;  // with a unit: in which it is used
  bool sharded = false;               // each rank keeps its shard only
  bool trainable = true;              // false: it has neither gradient nor optimizer state
  // Of a matrix that Muon updates: its rows as it lies in memory, row by row; and rows / columns as the model has it,
  // which may be the transpose. 0: anything else.
  std::int64_t rows = 0;
  double rows_by_columns = 0;
};

struct Placement {
  int param = 0;            // index in registration order
  std::int64_t offset = 0;  // first element in the bucket
  std::int64_t numel = 0;
};

struct BucketLayout {
  DType dtype = DType::kF32;
  int unit = -1;
  DType compute_dtype = DType::kF32;
  bool sharded = false;
  bool trainable = true;
  bool matrices = false;              // that Muon updates: they keep another state than other parameters
  std::vector<Placement> placements;  // by ascending offset
  std::int64_t numel = 0;             // num_shards * shard_numel
  std::int64_t shard_numel = 0;       // a multiple of kBlockNumel
};

class ShardLayout {
 public:
  // Buckets hold parameters that agree in dtypes, unit, sharded, trainable and in being matrices, in reverse
  // registration order (the order in which backward produces gradients), and are cut when the next parameter would take
  // them past bucket_numel; a larger parameter has a bucket of its own.
  ShardLayout(std::span<const ParamSpec> params, int num_shards, std::int64_t bucket_numel);

  int num_shards() const { return num_shards_; }
  int num_params() const { return static_cast<int>(locations_.size()); }
  const std::vector<BucketLayout>& buckets() const { return buckets_; }

  struct Location {
    int bucket = 0;
    std::int64_t offset = 0;
  };
  Location location(int param) const { return locations_[static_cast<std::size_t>(param)]; }

  // The parts of parameters that lie in elements [begin, end) of a bucket; Piece::offset counts from begin, Piece::slot
  // is the parameter. begin and end must be multiples of kBlockNumel.
  std::vector<device::Piece> pieces(int bucket, std::int64_t begin, std::int64_t end) const;

 private:
  int num_shards_;
  std::vector<BucketLayout> buckets_;
  std::vector<Location> locations_;
};

}  // namespace zc::zero
