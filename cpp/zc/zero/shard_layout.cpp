#include "zc/zero/shard_layout.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "zc/base/error.h"

namespace zc::zero {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Where a parameter of `numel` elements may start at or after `cursor`.
std::int64_t place(std::int64_t cursor, std::int64_t numel) {
  if (numel >= kBlockNumel) return round_up(cursor, kBlockNumel);
  const std::int64_t start = round_up(cursor, kSmallAlignment);
  const bool straddles = numel > 0 && start / kBlockNumel != (start + numel - 1) / kBlockNumel;
  return straddles ? round_up(start, kBlockNumel) : start;
}

}  // namespace

ShardLayout::ShardLayout(std::span<const ParamSpec> params, int num_shards, std::int64_t bucket_numel)
    : num_shards_(num_shards), locations_(params.size()) {
  ZC_CHECK(num_shards >= 1, kInternal, "[zero] layout over ", num_shards, " shards");
  ZC_CHECK(bucket_numel >= 1, kConfig, "[zero] bucket size must be positive: got ", bucket_numel, " elements");
  struct Open {
    int bucket = -1;
    std::int64_t cursor = 0;
  };
  std::map<std::tuple<DType, int, DType, bool, bool, bool>, Open> open_by_key;
  for (int i = static_cast<int>(params.size()) - 1; i >= 0; --i) {
    const ParamSpec& param = params[static_cast<std::size_t>(i)];
    ZC_CHECK(param.numel >= 0 && is_floating(param.dtype), kInternal, "[zero] parameter ", param.name, " has ",
             param.numel, " elements of ", zc::name(param.dtype));
    ZC_CHECK(!param.sharded || param.unit >= 0, kInternal, "[zero] parameter ", param.name,
             " is sharded without a unit");
    const bool matrix = param.rows > 0;
    Open& open = open_by_key[{param.dtype, param.unit, param.compute_dtype, param.sharded, param.trainable, matrix}];
    std::int64_t offset = place(open.cursor, param.numel);
    if (open.bucket < 0 || (open.cursor > 0 && offset + param.numel > bucket_numel)) {
      open.bucket = static_cast<int>(buckets_.size());
      buckets_.push_back(
          {param.dtype, param.unit, param.compute_dtype, param.sharded, param.trainable, matrix, {}, 0, 0});
      offset = 0;
    }
    buckets_[static_cast<std::size_t>(open.bucket)].placements.push_back({i, offset, param.numel});
    locations_[static_cast<std::size_t>(i)] = {open.bucket, offset};
    open.cursor = offset + param.numel;
  }
  for (BucketLayout& bucket : buckets_) {
    const Placement& last = bucket.placements.back();
    bucket.shard_numel = round_up(last.offset + last.numel, num_shards * kBlockNumel) / num_shards;
    bucket.numel = bucket.shard_numel * num_shards;
  }
}

std::vector<device::Piece> ShardLayout::pieces(int bucket, std::int64_t begin, std::int64_t end) const {
  ZC_CHECK(begin % kBlockNumel == 0 && end % kBlockNumel == 0, kInternal, "[zero] shard cut off a block boundary: [",
           begin, ", ", end, ")");
  std::vector<device::Piece> out;
  for (const Placement& p : buckets_[static_cast<std::size_t>(bucket)].placements) {
    const std::int64_t first = std::max(begin, p.offset);
    const std::int64_t last = std::min(end, p.offset + p.numel);
    if (first < last) out.push_back({first - begin, last - first, p.param});
  }
  return out;
}

}  // namespace zc::zero
