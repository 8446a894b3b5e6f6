// The collectives of one group: how the payload moves once the guard has let all ranks in.
#pragma once

#include <atomic>
#include <chrono>
#include <vector>

#include "zc/base/buffer_view.h"
#include "zc/base/memory.h"
#include "zc/comm/guard.h"
#include "zc/comm/task.h"
#include "zc/comm/work.h"

namespace zc::comm {

// One collective as the endpoint's driver sees it.
struct Operation {
  CallHeader header{};
  BufferView in{};
  BufferView out{};
  bool first = false;
  bool meets_only = false;
  std::chrono::milliseconds timeout{0};
};

class Collectives {
 public:
  Collectives(Endpoint& endpoint, std::vector<int> ranks, int index, int context)
      : endpoint_(endpoint), context_(context), guard_(endpoint, std::move(ranks), index, context) {}

  // Runs the collective and completes `state`, by the endpoint's driver; one at a time. Never throws: a failure is
  // announced to all ranks.
  Task execute(const Operation& operation, Work::State& state);

  std::int64_t staging_bytes() const { return staging_bytes_; }  // from any thread

 private:
  void give_up(const Operation& operation, const Error& error, Work::State& state) noexcept;
  Task run(const Operation& operation, Work::State& state);
  Task reduce_scatter_add(const BufferView& bucket, const BufferView& shard, bool first);
  Task broadcast(const BufferView& view, int root);
  Task all_reduce(const BufferView& values, ReduceOp op, bool rides);  // rides: the payload came with the headers
  Task gather(const BufferView& in, std::byte* out);
  Task gather_bytes(const BufferView& in, std::byte* out, bool rides);

  bool all_have_places() const;
  template <class Read>
  Task read_in_place(int from, std::int64_t bytes, Read read);

  template <class Source, class Target, class Consume>
  Task exchange(std::int64_t bytes, std::int64_t piece_bytes, Source source, Target target, Consume consume);
  std::byte* staging(std::int64_t slot, int peer);

  Endpoint& endpoint_;
  int context_;
  Guard guard_;
  std::vector<const std::byte*> mapped_;  // by member, in this call
  Memory staging_;
  std::atomic<std::int64_t> staging_bytes_{0};
};

}  // namespace zc::comm
