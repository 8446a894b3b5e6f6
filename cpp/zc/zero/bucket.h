// A bucket and the memory of its model states. Which of them are whole and which are shards is the stage, as data.
#pragma once

#include <array>
#include <string>

#include "zc/base/buffer_view.h"
#include "zc/base/memory.h"
#include "zc/device/piece_table.h"
#include "zc/zero/shard_layout.h"

namespace zc::zero {

// What a ZeRO stage keeps as a shard (Rajbhandari et al. 2020, section 5), besides the parameters: which of those are
// sharded is a property of each (ParamSpec::sharded), since stage 3 keeps small ones whole. With the ordered reduction
// stages 1 and 2 keep the same.
struct StagePolicy {
  bool shard_grads = false;
  bool shard_optimizer = false;
  static StagePolicy of(int stage) { return {stage >= 1, stage >= 1}; }
};

// "Owned" is the part of the bucket whose optimizer state this rank keeps: its shard, or all of it in stage 0. "Kept"
// is the part whose parameters it keeps: its shard when they are sharded, else all. Offsets are in elements of the
// bucket.
struct Bucket {
  std::string label;  // "bucket 7 (layers.3.mlp.up.weight and others)"
  std::int64_t kept_offset = 0;
  std::int64_t owned_offset = 0;
  std::int64_t shard_offset = 0;
  BufferView params;                 // kept, model dtype
  BufferView grads;                  // owned: the accumulator. Null, as what follows, when nothing is trained
  BufferView grad_shard;             // the part of grads that reductions fold into
  BufferView master;                 // owned, fp32; for an fp32 model the owned part of params itself
  std::array<BufferView, 2> states;  // owned, fp32; null when the optimizer keeps fewer
  device::PieceTable pieces;         // of the owned part
  device::PieceTable shard_pieces;   // of the shard
};

}  // namespace zc::zero
