// The collectives of one group: how the payload moves once the guard has let all ranks in.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <vector>

#include "zc/base/buffer_view.h"
#include "zc/base/memory.h"
#include "zc/comm/guard.h"
#include "zc/comm/work.h"

namespace zc::comm {

// One collective as the progress thread sees it.
struct Operation {
  CallHeader header{};
  BufferView in{};
  BufferView out{};
  std::chrono::milliseconds timeout{0};
};

class Collectives {
 public:
  Collectives(Endpoint& endpoint, std::vector<int> ranks, int index, int context)
      : endpoint_(endpoint), context_(context), guard_(endpoint, std::move(ranks), index, context) {}

  // Runs the collective and completes `state`, on the progress thread. A failure is announced to all ranks.
  void execute(const Operation& operation, Work::State& state) noexcept;

  std::int64_t staging_bytes() const { return staging_bytes_; }  // from any thread

 private:
  // `rides`: the payload came with the headers.
  void give_up(const Operation& operation, const Error& error, Work::State& state) noexcept;
  void run(const Operation& operation);
  void reduce_scatter_add(const BufferView& bucket, const BufferView& shard);
  void broadcast(const BufferView& view, int root);
  void all_reduce(const BufferView& values, ReduceOp op, bool rides);
  void gather(std::byte* out, std::int64_t bytes);
  void gather_from(const BufferView& in, std::byte* out, bool rides);

  template <class Source, class Target, class Consume>
  void exchange(std::int64_t bytes, std::int64_t piece_bytes, const Source& source, const Target& target,
                const Consume& consume);
  std::byte* staging(std::int64_t slot, int peer);

  Endpoint& endpoint_;
  int context_;
  Guard guard_;
  Memory staging_;
  std::atomic<std::int64_t> staging_bytes_{0};
};

}  // namespace zc::comm
