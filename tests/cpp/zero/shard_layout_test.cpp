#include "zc/zero/shard_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "zc/base/error.h"

namespace zc::zero {
namespace {

std::vector<ParamSpec> params_of(std::initializer_list<std::int64_t> numels, DType dtype = DType::kF32) {
  std::vector<ParamSpec> out;
  for (std::int64_t numel : numels) out.push_back({"p" + std::to_string(out.size()), numel, dtype, 0});
  return out;
}

TEST(ShardLayoutTest, PlacesInReverseOrderOnBlockBoundaries) {
  const auto params = params_of({10, 2000, 100, 1024});
  const ShardLayout layout(params, 1, 1 << 20);
  ASSERT_EQ(layout.buckets().size(), 1u);
  EXPECT_EQ(layout.location(3).offset, 0);
  EXPECT_EQ(layout.location(2).offset, 1024);
  EXPECT_EQ(layout.location(1).offset, 2048);  // the block that 100 elements began is left
  EXPECT_EQ(layout.location(0).offset, 4096);  // the first multiple of 64 from 2048 + 2000 on
  EXPECT_EQ(layout.buckets()[0].numel, 5120);
}

TEST(ShardLayoutTest, SmallParametersShareABlockAndNeverStraddleOne) {
  const auto params = params_of({500, 500, 500});
  const ShardLayout layout(params, 1, 1 << 20);
  EXPECT_EQ(layout.location(2).offset, 0);
  EXPECT_EQ(layout.location(1).offset, 512);
  EXPECT_EQ(layout.location(0).offset, 1024);
}

TEST(ShardLayoutTest, CutsBucketsBySizeAndDtype) {
  auto params = params_of({1024, 1024, 1024, 5000, 1024});
  params[1].dtype = DType::kBF16;
  const ShardLayout layout(params, 2, 2048);
  // Reverse order, fp32: {4}, {3} (too large, alone), {2, 0}; bf16: {1}.
  ASSERT_EQ(layout.buckets().size(), 4u);
  EXPECT_NE(layout.location(4).bucket, layout.location(3).bucket);
  EXPECT_NE(layout.location(3).bucket, layout.location(2).bucket);
  EXPECT_EQ(layout.location(2).bucket, layout.location(0).bucket);
  EXPECT_EQ(layout.buckets()[static_cast<std::size_t>(layout.location(1).bucket)].dtype, DType::kBF16);
  EXPECT_EQ(layout.buckets()[static_cast<std::size_t>(layout.location(3).bucket)].placements.size(), 1u);
}

TEST(ShardLayoutTest, ZeroElementsAndScalarsHaveAPlace) {
  const ShardLayout layout(params_of({0, 1, 0}), 3, 1 << 20);
  ASSERT_EQ(layout.buckets().size(), 1u);
  EXPECT_EQ(layout.buckets()[0].numel, 3 * 1024);
  const ShardLayout empty(params_of({0}), 3, 1 << 20);
  EXPECT_EQ(empty.buckets()[0].numel, 0);
  EXPECT_TRUE(empty.pieces(0, 0, 0).empty());
}

TEST(ShardLayoutTest, RejectsABucketSizeBelowOneAndAShardWithoutAUnit) {
  auto params = params_of({4});
  EXPECT_THROW(ShardLayout(params, 1, 0), Error);
  params[0].sharded = true;
  EXPECT_THROW(ShardLayout(params, 1, 4), Error);
}

// Gives parameters other dtypes, units and kinds at random.
void mix(std::vector<ParamSpec>& params, std::mt19937& random) {
  const DType dtypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  for (ParamSpec& p : params) {
    p.dtype = dtypes[random() % 2];
    p.compute_dtype = dtypes[random() % 3];
    p.unit = static_cast<int>(random() % 4) - 1;
    p.sharded = p.unit >= 0 && random() % 2;
    p.trainable = random() % 3 != 0;
  }
}

TEST(ShardLayoutTest, ParametersThatDifferNeverShareABucket) {
  const auto base = params_of({100, 100, 100, 100, 100, 100, 100, 100});
  auto params = base;
  params[1].dtype = DType::kBF16;
  params[2].unit = 0;
  params[3].unit = 1;
  params[4].unit = 1;
  params[4].compute_dtype = DType::kBF16;
  params[5].unit = 1;
  params[5].sharded = true;
  params[6].trainable = false;
  params[7].rows = 10;
  EXPECT_EQ(ShardLayout(base, 2, 1 << 20).buckets().size(), 1u);
  EXPECT_EQ(ShardLayout(params, 2, 1 << 20).buckets().size(), 8u);

  std::mt19937 random(3);
  for (int trial = 0; trial < 20; ++trial) {
    std::vector<ParamSpec> mixed(100, {"p", 300, DType::kF32, 0});
    mix(mixed, random);
    for (std::int64_t bucket_numel : {1, 2000, 1 << 20}) {
      const ShardLayout layout(mixed, 3, bucket_numel);
      std::size_t placed = 0;
      for (const BucketLayout& bucket : layout.buckets()) {
        placed += bucket.placements.size();
        for (const Placement& at : bucket.placements) {
          const ParamSpec& p = mixed[static_cast<std::size_t>(at.param)];
          EXPECT_EQ(p.dtype, bucket.dtype);
          EXPECT_EQ(p.unit, bucket.unit);
          EXPECT_EQ(p.compute_dtype, bucket.compute_dtype);
          EXPECT_EQ(p.sharded, bucket.sharded);
          EXPECT_EQ(p.trainable, bucket.trainable);
        }
        // A bucket is cut only when the next parameter would make it too large.
        EXPECT_TRUE(bucket.placements.size() == 1 ||
                    bucket.placements.back().offset + bucket.placements.back().numel <= bucket_numel);
      }
      EXPECT_EQ(placed, mixed.size());
    }
  }
}

// The promise the numerics rest on: for any sizes, shards, cuts and units, each parameter's norm blocks are the same.
TEST(ShardLayoutTest, BlocksDoNotDependOnShardsOrCutsOrUnits) {
  std::mt19937 random(7);
  const std::int64_t sizes[] = {0, 1, 3, 63, 64, 65, 900, 1023, 1024, 1025, 2047, 5000, 40000};
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<ParamSpec> params;
    for (int i = 0; i < 20; ++i) params.push_back({"p", sizes[random() % std::size(sizes)], DType::kF32, 0});
    if (trial % 2) mix(params, random);
    for (int num_shards : {1, 2, 3, 5, 8}) {
      for (std::int64_t bucket_numel : {1, 3000, 50000, 1 << 30}) {
        const ShardLayout layout(params, num_shards, bucket_numel);
        std::vector<std::vector<std::uint8_t>> covered;
        for (const ParamSpec& p : params) covered.emplace_back(static_cast<std::size_t>(p.numel), 0);
        for (int b = 0; b < static_cast<int>(layout.buckets().size()); ++b) {
          const BucketLayout& bucket = layout.buckets()[static_cast<std::size_t>(b)];
          ASSERT_EQ(bucket.numel, bucket.shard_numel * num_shards);
          ASSERT_EQ(bucket.shard_numel % kBlockNumel, 0);
          std::int64_t previous_end = 0;
          for (const Placement& p : bucket.placements) {
            ASSERT_GE(p.offset, previous_end);
            previous_end = p.offset + p.numel;
          }
          ASSERT_LE(previous_end, bucket.numel);
          for (int r = 0; r < num_shards; ++r) {
            const std::int64_t begin = r * bucket.shard_numel;
            for (const device::Piece& piece : layout.pieces(b, begin, begin + bucket.shard_numel)) {
              const std::int64_t in_param = begin + piece.offset - layout.location(piece.slot).offset;
              ASSERT_EQ(in_param % kBlockNumel, 0);  // a piece starts at a block of its parameter
              auto& flags = covered[static_cast<std::size_t>(piece.slot)];
              for (std::int64_t i = 0; i < piece.numel; ++i) ++flags[static_cast<std::size_t>(in_param + i)];
              const bool ends_param = in_param + piece.numel == static_cast<std::int64_t>(flags.size());
              ASSERT_TRUE(ends_param || piece.numel % kBlockNumel == 0);
            }
          }
        }
        for (const auto& flags : covered) {
          ASSERT_TRUE(std::all_of(flags.begin(), flags.end(), [](std::uint8_t n) { return n == 1; }));
        }
      }
    }
  }
}

}  // namespace
}  // namespace zc::zero
