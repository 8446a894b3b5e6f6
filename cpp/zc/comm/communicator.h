// Collectives over a group of ranks.
//
// The public functions check what users can get wrong, count the payload and build the guard's fingerprint; backends
// implement run() only. All ranks of a group must call the same collectives in the same order. Calls on one
// communicator come from one thread at a time; each returns at once. Collectives of one communicator run in call order.
// Those of different communicators are independent, also over the same ranks: ranks may call them in any relative
// order.
//
// Memory may be that of a device that runs behind (Device::runs_behind): then a collective starts after what was on the
// stream `after` when it was called, and Work::wait(stream) lets a stream go on after it. Which memory a backend takes,
// it says in takes(). Host memory is ready when the call is made.
//
// The guard: every collective carries a 64-bit fingerprint (sequence number, operation, dtypes, numel, label). Ranks
// compare them as they meet; a difference, a peer that announced a failure or left, or one that does not arrive within
// the timeout becomes an Error of kind kComm on every rank, which says what each rank was doing. After a failure every
// communicator of this rank is broken: later collectives fail at once with the first reason.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "zc/base/buffer_view.h"
#include "zc/base/memory.h"
#include "zc/comm/work.h"

namespace zc::comm {

enum class Op : std::uint8_t { kReduceScatterAdd, kAllGather, kBroadcast, kAllReduce, kGatherBytes, kBarrier, kSplit };
inline constexpr int kNumOps = 7;
const char* name(Op op);

enum class ReduceOp : std::uint8_t { kSum, kMax, kBitOr };

// How a rank ends its part in the job.
enum class Departure : std::uint8_t { kEnded, kFailed };

struct Counter {
  std::int64_t calls = 0;
  std::int64_t elements = 0;  // payload elements handed in: the whole bucket, whatever the number of ranks
  std::int64_t bytes = 0;     // of these
};

struct Options {
  std::chrono::milliseconds timeout{600'000};
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  virtual const char* backend() const = 0;  // "self", "local", "mpi", "shm", "nccl", "staged", "plan"

  // Whether collectives may be given memory of this device.
  virtual bool takes(DeviceId device) const { return device.type == DeviceType::kCpu; }

  // Zeroed memory that peers may read, aligned to 64 bytes.
  virtual Memory allocate(std::int64_t bytes);

  // Zeroed memory, aligned to 64 bytes, that is one and the same for all ranks of the group: each sees what the others
  // write. It lives until the last of them frees it. Throws kUnsupported where ranks have no memory in common.
  // Collective; blocks.
  virtual Memory allocate_shared(std::int64_t bytes, std::string_view label);

  // The ordered fold. bucket: size() slices of shard.numel elements. Both: fp32, fp16 or bf16. For r in 0..size()-1, in
  // this order: shard += slice rank() of rank r's bucket, in fp32, rounded to the shard's dtype after each addition.
  // The bucket is left as it was. first: the shard counts as +0, whatever it holds. turn: see Work::may_wait.
  Work reduce_scatter_add(BufferView bucket, BufferView shard, std::string_view label, bool first = false,
                          device::Stream after = {}, std::int64_t turn = 0);

  // full: size() slices; slice rank() holds this rank's contribution, the others are filled in place.
  Work all_gather(BufferView full, std::string_view label, device::Stream after = {});

  // The same from memory outside `full`, which is filled completely. shard: this rank's contribution, full.numel /
  // size() elements of full's dtype; slice rank() of full, or disjoint from it. Ranks may mix the two forms.
  Work all_gather(BufferView shard, BufferView full, std::string_view label, device::Stream after = {});

  // Copies root's view to every rank.
  Work broadcast(BufferView view, int root, std::string_view label, device::Stream after = {});

  // Small exact reductions, element by element, in place.
  Work all_reduce(std::span<std::int64_t> values, ReduceOp op, std::string_view label);
  Work all_reduce(BufferView values, ReduceOp op, std::string_view label, device::Stream after);  // dtype kI64

  // out: size() times in.size() bytes, in rank order. in.size() must be equal on all ranks.
  Work gather_bytes(std::span<const std::byte> in, std::span<std::byte> out, std::string_view label);

  Work barrier(std::string_view label);

  // Ranks with equal `color` form a new group, ordered by (key, rank). Collective over the group; blocks. A rank makes
  // one split at a time, whatever the communicator.
  std::shared_ptr<Communicator> split(int color, int key);

  // What this rank is doing ("step 41"); shown in the errors of every rank, whichever communicator of this rank fails.
  // At most 60 characters are kept. A copy, no formatting.
  virtual void set_activity(std::string_view activity) = 0;

  // How long a collective waits for a peer that does not arrive. Holds for collectives called from now on.
  void set_timeout(std::chrono::milliseconds timeout);
  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_ms_.load()); }

  // Announces to all ranks of the job that this one ends ("ended its script") or failed ("raised ValueError: ..."):
  // their pending and later collectives end with a CommError that quotes it. Then waits, at most `grace`, until every
  // peer has left too, so that all can speak before the job is torn down. Later collectives on this rank fail.
  // Idempotent, never throws. From any thread.
  virtual void leave(Departure departure, std::string_view reason, std::chrono::milliseconds grace) noexcept = 0;

  // From here on the end of any rank's process, by whatever way, is known to all within moments: for ranks that are
  // processes of one host (zc/comm/liveness.h). Returns why that is not possible here, empty when it is. Once, over all
  // ranks of the job. Collective; blocks.
  virtual std::string watch_processes() { return {}; }

  // Where in the caller's code a rank is ("train.py:57") is not told on each call, but asked for when something has
  // failed; then it stands in the errors of all ranks. After promise_place() a thread of the caller's blocks in
  // place_wanted() and answers with tell_place(); a failure waits a moment for it. False: nobody will ask any more,
  // since this rank has left. From any thread.
  virtual void promise_place() {}
  virtual bool place_wanted() { return false; }
  virtual void tell_place(std::string_view /*place*/) {}

  // Why collectives of this rank can no longer succeed, or which peer's failure it was told of; empty while all is
  // well. From any thread.
  virtual std::string failure() const = 0;

  // Memory held to receive peers' buckets, allocated at the first reduce_scatter_add. From any thread.
  virtual std::int64_t staging_bytes() const { return 0; }

  const std::array<Counter, kNumOps>& counters() const { return counters_; }

  // From now on the time from each call to its collective's end is added up, in groups that are split off as well.
  // What overlaps counts in full. From the thread of the calls.
  void time_calls();
  std::int64_t nanoseconds(Op op) const;  // 0 without time_calls(). From any thread

  // One collective, as backends see it.
  struct Call {
    Op op = Op::kBarrier;
    ReduceOp reduce = ReduceOp::kSum;
    int root = 0;
    bool first = false;
    bool meets_only = false;  // see meet()
    BufferView in{};
    BufferView out{};
    device::Stream after{};
    std::int64_t turn = 0;
    std::uint64_t sequence = 0;
    std::uint64_t fingerprint = 0;
    std::string_view label{};  // copied by the backend when it outlives the call

    // Of the payload handed in: a gather's is the whole, whatever the number of ranks.
    std::int64_t numel() const { return op == Op::kAllGather || op == Op::kGatherBytes ? out.numel : in.numel; }
  };

  // For who moves data beside this communicator, among the same ranks: they meet for `call` under the guard, in the
  // order of all calls here, and nothing is moved. What that fails with names every rank's call, as ever.
  Work meet(Call call);

  // For them, too: announces to all ranks of the job that a collective of this one has failed, as if it had been one of
  // this communicator. The first failure counts. From any thread.
  virtual void announce_failure(const std::string& reason) noexcept = 0;

  // And: has failure() tell what peers have announced, and who has died, though no collective is under way that would
  // look for it. Does not wait. From any thread.
  virtual void look_for_failures() {}

 protected:
  Communicator(int rank, int size, Options options);
  virtual Work run(const Call& call) = 0;

  // in: this rank's (color, key). Runs the collective that `call` describes and returns this rank's new group.
  virtual std::shared_ptr<Communicator> run_split(const Call& call, int color, int key) = 0;

 private:
  Work submit(Call call);
  void check_memory(const char* op, const char* what, const BufferView& view) const;
  void seal(Call& call);  // counts the call, gives it its sequence number and fingerprint

  int rank_;
  int size_;
  std::atomic<std::int64_t> timeout_ms_;
  std::uint64_t sequence_ = 0;
  std::array<Counter, kNumOps> counters_{};
  std::array<std::shared_ptr<std::atomic<std::int64_t>>, kNumOps> nanoseconds_{};  // null: not timed
};

}  // namespace zc::comm
